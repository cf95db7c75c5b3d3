"""The end of turn of trained chats in the generation config of the saved model."""

import json

import pytest
import torch
from torch.nn.functional import one_hot
from transformers import AutoModelForCausalLM, GenerationConfig

from ebft import RunConfig, train
from ebft.models import load, pretrained
from ebft.run import output, training
from ebft.tools.export.merge import MergeSource, merge_adapter
from tests.config.conftest import warned
from tests.golden.runs import LORA
from tests.structured.conftest import chat_model, make_chat_tokenizer

EOS, END = 1, 3  # <|endoftext|> and <|im_end|>
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
PAIR = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
PAIR |= {"prompt": CHAT["messages"][:1]}
TEXTS = {"question": "Hi", "chosen": "Hello", "rejected": "No"}


@pytest.fixture
def make(tmp_path, out, monkeypatch):
    """`make(row, type, declared, of_data, **keys)`: a config of one step on such rows, and its base model."""
    monkeypatch.chdir(tmp_path)
    common = {"base_model": "base", "sequence_len": 128, "micro_batch_size": 2, "max_steps": 1, "learning_rate": 1e-3}
    common |= {"torch_dtype": "float32", "output_dir": str(out)}

    def config(row=CHAT, type="chat_template", declared=EOS, of_data=None, **keys):
        tokenizer = make_chat_tokenizer()
        model = chat_model(tokenizer)
        model.generation_config.eos_token_id = declared
        for each in (model, tokenizer):
            each.save_pretrained("base")
        (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4))
        data = [{"path": "rows.jsonl", "type": type, **(of_data or {})}]
        return RunConfig.from_dict({**common, "datasets": data, **keys})

    return config


def told(act):
    """What a call returns, and its warnings about the end of turn."""
    found, said = warned(act)
    return found, [text for text in said if "special_tokens.eos_token" in text]


def declared(config):
    """The end-of-sequence ids after `declare_end_of_turn`, whether the adapter gets them, and the warnings."""
    tokenizer = pretrained.load_tokenizer(config)
    rows, model = training.run_rows(config, tokenizer), load.load_model(config, tokenizer)
    rows = training.arranged(config, rows, None)[0]
    write, messages = told(lambda: output.declare_end_of_turn(config, model, tokenizer, rows))
    eos = model.generation_config.eos_token_id
    return eos if isinstance(eos, list) else [eos], bool(write), messages


def stops(folder, token):
    """Whether generate() with its default settings stops at a token, which every step samples."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    always = lambda ids, scores: one_hot(torch.full(scores.shape[:1], token), scores.shape[1]).float()
    ids = model.generate(torch.tensor([[40, 41]]), max_new_tokens=4, do_sample=False, logits_processor=[always])
    return ids.shape[1] == 3


def test_a_full_model_stops_at_the_end_of_a_turn(make, out):
    result, messages = told(lambda: train(make()))
    assert result.model.generation_config.eos_token_id == [EOS, END] and messages == []
    assert GenerationConfig.from_pretrained(out).eos_token_id == [EOS, END]
    assert stops(out, END) and stops(out, EOS) and not stops("base", END)


NAMED = {"special_tokens": {"eos_token": "<|im_end|>"}}


@pytest.mark.parametrize("keys", [{}, NAMED], ids=["warning", "remedy"])
def test_an_adapter_gives_a_warning_and_its_merged_model_stops(make, out, keys):
    result, messages = told(lambda: train(make(**LORA, **keys)))
    assert set(result.model.generation_config.eos_token_id) == {EOS, END} and len(messages) == (not keys)
    for message in messages:
        assert "ends replies with <|im_end|>" in message and "Set special_tokens.eos_token: <|im_end|>," in message
    for folder in (out, out / "checkpoint-1"):
        merge_adapter(MergeSource(folder, "base", tokenizer=folder), folder / "merged")
        assert stops(folder / "merged", END) and stops(folder / "merged", EOS)


TURNS = {"type": "ebft_chat_multiturn", "trl": {"num_generations": 2, "max_completion_length": 4}}
TURNS |= {"rl": "ebft", "ebft": {"mode": "structured"}}
TEXT = {"row": {"text": "Hi"}, "type": "completion"}


@pytest.mark.parametrize(("keys", "expected", "is_written"), [
    # rows of other shapes
    ({**LORA, "sample_packing": True}, [EOS, END], True),
    ({**LORA, "row": PAIR, "type": "passthrough", "rl": "dpo"}, [EOS, END], True),
    ({**LORA, **TURNS}, [EOS, END], True),
    # models that stop anyway, or learn no chats
    ({**LORA, **TEXT}, [EOS], False), ({**LORA, "of_data": {"train_on_eos": "none"}}, [EOS], False),
    ({**LORA, "row": TEXTS, "type": "chatml.intel", "rl": "dpo"}, [EOS], False),  # with EOS after the end
    # without a chat template; transformers adds the end of sequence to a full model
    ({**LORA, **TEXT, **NAMED, "template": False}, [EOS, END], True),
    ({**TEXT, **NAMED, "template": False}, [EOS], False),
])  # fmt: skip
def test_what_is_declared(make, tmp_path, keys, expected, is_written):
    has_template = keys.get("template", True)
    config = make(**{key: value for key, value in keys.items() if key != "template"})
    if not has_template:
        (tmp_path / "base" / "chat_template.jinja").unlink()
    eos, written, messages = declared(config)
    assert (eos, written) == (expected, is_written) and len(messages) == (is_written and has_template)
