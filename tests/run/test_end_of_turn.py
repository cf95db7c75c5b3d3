"""The end of turn of trained chats in the generation config of the saved model."""

import json
import warnings

import pytest
import torch
from torch.nn.functional import one_hot
from transformers import AutoModelForCausalLM, GenerationConfig

from ebft import RunConfig, train
from ebft.tools.export.merge import MergeSource, merge_adapter
from tests.golden.runs import LORA
from tests.structured.conftest import chat_model, make_chat_tokenizer

EOS, END = 1, 3  # <|endoftext|> and <|im_end|>
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
PAIR = {"prompt": CHAT["messages"][:1]}
PAIR |= {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
TEXTS = {"question": "Hi", "chosen": "Hello", "rejected": "No"}


@pytest.fixture
def run(tmp_path):
    """One step on rows; returns the end-of-sequence ids of the model in memory, and the warnings about its end."""

    def trained(row=CHAT, type="chat_template", declared=EOS, **keys):
        tokenizer = make_chat_tokenizer()
        model = chat_model(tokenizer)
        model.generation_config.eos_token_id = declared
        model.save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4))
        config = RunConfig.from_dict(
            {
                "base_model": str(tmp_path / "base"),
                "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": type}],
                "sequence_len": 128,
                "micro_batch_size": 2,
                "max_steps": 1,
                "learning_rate": 1e-3,
                "torch_dtype": "float32",
                "output_dir": str(tmp_path / "out"),
                **keys,
            }
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = train(config).model
        found = [str(each.message) for each in caught if "special_tokens.eos_token" in str(each.message)]
        return model.generation_config.eos_token_id, found

    return trained


def stops(folder, token):
    """Whether generate() with its default settings stops at a token, which every step samples."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    always = lambda ids, scores: one_hot(torch.full(scores.shape[:1], token), scores.shape[1]).float()
    ids = model.generate(torch.tensor([[40, 41]]), max_new_tokens=4, do_sample=False, logits_processor=[always])
    return ids.shape[1] == 3


def test_a_full_model_stops_at_the_end_of_a_turn(run, tmp_path):
    assert run() == ([EOS, END], [])
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [EOS, END]
    assert stops(tmp_path / "out", END) and stops(tmp_path / "out", EOS) and not stops(tmp_path / "base", END)


def test_an_adapter_gives_a_warning_and_its_merged_model_stops(run, tmp_path):
    eos, (message,) = run(**LORA)
    assert eos == [EOS, END]
    assert "ends replies with <|im_end|>" in message and "Set special_tokens.eos_token: <|im_end|>," in message
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):
        merge_adapter(MergeSource(folder, str(tmp_path / "base"), tokenizer=folder), folder / "merged")
        assert stops(folder / "merged", END) and stops(folder / "merged", EOS)


def test_the_remedy_of_the_warning(run, tmp_path):
    keys = {"special_tokens": {"eos_token": "<|im_end|>"}}
    eos, messages = run(**LORA, **keys)
    assert set(eos) == {EOS, END} and messages == []
    merge_adapter(
        MergeSource(tmp_path / "out", str(tmp_path / "base"), tokenizer=tmp_path / "out"), tmp_path / "merged"
    )
    assert stops(tmp_path / "merged", END)


@pytest.mark.parametrize(
    "keys",
    [
        {"declared": [EOS, END]},
        {"row": {"text": "Hi"}, "type": "completion"},
        {"datasets": [{"path": "rows.jsonl", "type": "chat_template", "train_on_eos": "none"}]},
        {"row": TEXTS, "type": "chatml.intel", "rl": "dpo"},  # with EOS after the end of the turn
        {"special_tokens": {"eos_token": "<|im_end|>"}, "declared": END},
    ],
)
def test_models_that_stop_anyway_or_learn_no_chats_are_not_changed(run, tmp_path, monkeypatch, keys):
    monkeypatch.chdir(tmp_path)
    eos, messages = run(**LORA, **keys)
    expected = keys.get("declared", EOS)
    assert messages == [] and (eos if isinstance(eos, list) else [eos]) in (expected, [expected])
    assert not (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"sample_packing": True},
        {"row": PAIR, "type": "passthrough", "rl": "dpo"},
        {
            "rl": "ebft",
            "ebft": {"mode": "structured"},
            "trl": {"num_generations": 2, "max_completion_length": 4},
            "type": "ebft_chat_multiturn",
        },
    ],
)
def test_rows_of_other_shapes(run, keys):
    eos, (message,) = run(**LORA, **keys)
    assert eos == [EOS, END] and "<|im_end|>" in message
