"""Replies are the same as from `generate`, with and without the adapter, and rewards the same as in training."""

import json
import shutil
import sys
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft import EBFTConfig, EBFTTrainer
from ebft.data.transforms.formats import written_prompt
from ebft.errors import DataError, ModelError
from ebft.models.weights import load_gguf_model
from ebft.printed import printable
from ebft.run.config.schema import load_config
from ebft.tools.inference.models import model_in_folder, model_of_run
from ebft.tools.inference.sampling import Sampler, SamplingOptions, Scorer, Session
from tests.structured.trainers import USER, rows

NAN, INF = float("nan"), float("inf")
CHAT = [USER("say 3")]
OPTIONS = SamplingOptions(max_new_tokens=8, temperature=0.8, top_p=0.9, top_k=50, seed=7)


@pytest.fixture
def sampler(folders):
    return Sampler(model_in_folder(str(folders["adapter"])), OPTIONS)


def generated(model, ids, **changes):
    torch.manual_seed(7)
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_new_tokens": 8, **changes}
    output = model.generate(torch.tensor([ids]), eos_token_id=[1, 3], pad_token_id=0, **settings)
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("prompt", [CHAT, "say 3"], ids=["chat", "completion"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_the_tokens_are_those_of_generate(prompt, greedy, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    chat = lambda: tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
    ids = (tokenizer(prompt) if isinstance(prompt, str) else chat())["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(folders["base"]).eval()
    changes = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None} if greedy else {}
    options = SamplingOptions(8, 0.0) if greedy else OPTIONS
    sampler = Sampler(model_in_folder(str(folders["adapter"])), options)
    of_base = generated(base, ids, **changes)
    assert sampler.reply_ids(prompt, base=True) == [of_base]
    tuned = PeftModel.from_pretrained(base, folders["adapter"]).eval()
    of_tuned = generated(tuned.get_base_model(), ids, **changes)
    assert sampler.reply_ids(prompt) == [of_tuned] and of_tuned != of_base


def test_the_base_of_a_fully_trained_model(folders, config_file, tmp_path):
    loaded = model_of_run(load_config(config_file("full")))
    base = Sampler(model_in_folder(str(folders["base"])), OPTIONS).reply_ids(CHAT)
    assert Sampler(loaded, OPTIONS).reply_ids(CHAT, base=True) == base
    assert Sampler(loaded, OPTIONS).reply_ids(CHAT) != base
    with pytest.raises(ModelError, match="Give it with --base-model"):
        Sampler(model_in_folder(str(folders["full"])), OPTIONS).reply_ids(CHAT, base=True)
    named = model_in_folder(str(folders["full"]), str(folders["base"]))
    assert Sampler(named, OPTIONS).reply_ids(CHAT, base=True) == base
    copy = shutil.copytree(folders["full"], tmp_path / "with-card")
    (copy / "README.md").write_text(f"---\nbase_model: {folders['base']}\n---\n")
    assert Sampler(model_in_folder(str(copy)), OPTIONS).reply_ids(CHAT, base=True) == base


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_rewards_are_those_of_the_trainer(kind, folders, config_file, tmp_path):
    config = load_config(config_file(kind))
    sampler = Sampler(model_of_run(config), OPTIONS)
    scored = Scorer(sampler, 4)(CHAT, "it is so 3")
    base = AutoModelForCausalLM.from_pretrained(folders["base"])
    policy = PeftModel.from_pretrained(base, folders["adapter"], is_trainable=True) if kind == "adapter" else base
    args = EBFTConfig(
        str(tmp_path / "out"), num_generations=4, per_device_train_batch_size=4, use_whitening=True,
        feature_layers=[0.5], diversity_coef=0.5, report_to="none",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    trainer = EBFTTrainer(policy, args, train_dataset=rows(multi_turn=False), processing_class=tokenizer)
    (reward,) = trainer.reward_funcs
    expected = reward([CHAT] * 4, completion_ids=scored.ids, ground_truth=["it is so 3"] * 4)
    assert scored.rewards == pytest.approx(expected, abs=1e-5) and len(set(scored.texts)) > 1
    assert scored.alignment == pytest.approx(reward.last.alignment.flatten().tolist(), abs=1e-5)
    assert scored.diversity == pytest.approx(reward.last.diversity.flatten().tolist(), abs=1e-5)
    assert Scorer(sampler, 4)(CHAT, "it is so 3", base=True).ids != scored.ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_full_model_that_diverged_is_refused(folders, tmp_path, temperature):
    shutil.copytree(folders["full"], tmp_path / "nan")
    sampler = Sampler(model_in_folder(str(tmp_path / "nan")), SamplingOptions(4, temperature))
    sampler.loaded.tuned.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(ModelError, match="nan computes NaN. Use an earlier"):
        sampler.reply_ids(CHAT)


def test_prompts_that_are_too_long(sampler):
    """Long texts are refused by their first part."""
    limit = sampler.loaded.tuned.config.max_position_embeddings
    with pytest.raises(DataError, match="positions"):
        sampler.reply_ids("a" * limit)
    assert len(sampler.reply_ids("a" * (limit - 2))[0]) <= 2
    with pytest.raises(DataError, match=f"Prompt and reference have .* tokens, but the model has {limit} pos"):
        Scorer(sampler, 2)("b", "a " * limit)


def test_a_session(sampler, capsys, monkeypatch):
    lines = lambda *given: Mock(side_effect=[*given, EOFError])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # control characters are symbols
    session = Session(sampler, write=written_prompt([]))
    session.run(lines("say 3", "", "/base", "say 3", "/nothing", "/help"))
    shown = capsys.readouterr().out
    first = sampler.text(sampler.reply_ids(CHAT)[0])
    of_base = sampler.text(sampler.reply_ids(CHAT, base=True)[0])
    assert printable(first) in shown and printable(of_base) in shown and printable(of_base) != of_base
    assert "Unknown command /nothing" in shown and "/reset  forget" in shown
    assert session._messages[False] == [*CHAT, {"role": "assistant", "content": first}]
    session.run(lines("/tuned", "and 4", "/exit", "not read"))
    assert [message["role"] for message in session._messages[False]] == ["user", "assistant"] * 2
    session.run(lines("/reset"))
    assert session._messages == {False: [], True: []}


def test_the_base_of_a_full_model_is_the_gguf_file_that_it_was_trained_from(folders, tiny_gguf, tmp_path):
    full, both = tmp_path / "full", tmp_path / "both"
    shutil.copytree(folders["full"], full)
    shutil.copytree(folders["base"], both)  # another model in the folder of the file
    shutil.copy(tiny_gguf, both)
    saved = {"base_model": str(both), "gguf_file": tiny_gguf.name}
    (full / "ebft_run.json").write_text(json.dumps(saved))
    base = model_in_folder(str(full)).load_base()
    wanted = load_gguf_model(str(tiny_gguf)).state_dict()
    assert all(torch.equal(weight, wanted[name]) for name, weight in base.state_dict().items())
