"""One dataset and one config for every method, switched by `rl` and `ebft.mode` alone."""

import warnings

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from ebft import load_config, train
from ebft.data.load import load_token_rows
from ebft.run.config.schema import parse_yaml
from tests.config.conftest import warned
from tests.docs.blocks import ROOT, blocks_of

OVERRIDES = {
    "plain": ["rl="], "strided": [], "structured": ["ebft.mode=structured"],
    "grpo": ["rl=grpo", "trl.reward_funcs=[feature_matching]"],
}  # fmt: skip


@pytest.fixture
def tokenizer(tiny_llama_dir):
    return AutoTokenizer.from_pretrained(tiny_llama_dir)


def quietly(path, overrides):
    with warnings.catch_warnings(action="ignore"):
        return load_config(path, overrides)


@pytest.mark.slow
def test_every_method_trains_on_the_same_rows_in_the_same_order(run_file, tokenizer, monkeypatch):
    met = []
    training_step = Trainer.training_step

    def spy(self, model, inputs, num_items_in_batch=None):
        texts = [row["prompt"] for row in inputs] if isinstance(inputs, list) else inputs["input_ids"]
        texts = [text if isinstance(text, str) else tokenizer.decode(text, skip_special_tokens=True) for text in texts]
        met.extend(text.split()[1] for text in texts)
        return training_step(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(Trainer, "training_step", spy)
    orders = {}
    for method, overrides in OVERRIDES.items():
        met.clear()
        rows = train(quietly(run_file, overrides)).trainer.eval_dataset
        texts = rows["prompt"] if "prompt" in rows.column_names else tokenizer.batch_decode(rows["input_ids"][:], True)
        held_out, orders[method] = {text.split()[1] for text in texts}, list(dict.fromkeys(met))
        assert len(held_out) == 2 and not held_out & set(orders[method])
        assert orders[method] == orders["plain"] and len(orders["plain"]) == 10


@pytest.mark.parametrize("method", OVERRIDES)
def test_every_method_trains_with_the_config_of_the_readme(run_file, method):
    """Its batch has as many completions as its rollouts per anchor, which is fewer than TRL's default."""
    found = (block.code for block in blocks_of(ROOT / "README.md") if block.language == "yaml")
    config, here = next(parse_yaml(code) for code in found if "rl: ebft" in code), parse_yaml(run_file.read_text())
    samples, config["trl"] = config["ebft"]["n_samples_per_prompt"], {"max_completion_length": 6}
    for key in ("base_model", "special_tokens", "datasets", "sequence_len", "output_dir"):
        config[key] = here[key]
    run_file.write_text(yaml.safe_dump(config))
    result, said = warned(lambda: train(load_config(run_file, [*OVERRIDES[method], "max_steps=1"])))
    assert "loss" in result.trainer.state.log_history[0]
    assert not any("ebft.n_samples_per_prompt" in text for text in said)
    if method in ("structured", "grpo"):
        assert result.trainer.num_generations == samples == 4


def test_plain_fine_tuning_learns_the_completion_alone(run_file, tokenizer, tiny_llama_dir):
    steps = ["rl=", "max_steps=1", "gradient_accumulation_steps=10", "micro_batch_size=1"]
    losses = [train(quietly(run_file, [*steps, f"train_on_inputs={on}"])).metrics for on in ("false", "true")]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    nll = {False: [], True: []}
    for row in load_token_rows(quietly(run_file, ["rl="]), tokenizer)[0]:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logp = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        nll[True] += (-logp).tolist()
        nll[False] += (-logp)[row["prompt_length"] - 1 :].tolist()
        assert row["input_ids"][-1] == tokenizer.eos_token_id
    for metrics, on in zip(losses, (False, True)):
        assert metrics["loss"] == pytest.approx(sum(nll[on]) / len(nll[on]), rel=1e-4)
