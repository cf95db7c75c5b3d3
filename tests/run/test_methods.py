"""One dataset and one config for every method, switched by `rl` and `ebft.mode` alone."""

import json
import warnings

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Trainer

from ebft import load_config, train

OVERRIDES = {
    "plain": ["rl="],
    "strided": [],
    "structured": ["ebft.mode=structured"],
    "grpo": ["rl=grpo", "trl.reward_funcs=[feature_matching]"],
}


@pytest.fixture
def run_file(tiny_llama_dir, tmp_path):
    """A strided config with a section for each method, over twelve pairs."""
    rows = [{"input": f"question {i} is", "output": f" the answer to it is {i}, and no other"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = {
        "base_model": str(tiny_llama_dir),
        "special_tokens": {"pad_token": "<|end|>"},
        "rl": "ebft",
        "ebft": {
            "mode": "strided",
            "context_length": 4,
            "stride": 4,
            "generate_max_len": 2,
            "n_samples_per_prompt": 2,
        },
        "trl": {"num_generations": 2, "max_completion_length": 6},
        "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "ebft_strided_structured.transform"}],
        "sequence_len": 64,
        "val_set_size": 2,
        "micro_batch_size": 2,
        "save_strategy": "no",
        "output_dir": str(tmp_path / "out"),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def quietly(path, overrides):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_config(path, overrides)


@pytest.mark.slow
def test_every_method_trains_on_the_same_rows_in_the_same_order(run_file, tiny_llama_dir, monkeypatch):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    met = []
    training_step = Trainer.training_step

    def spy(self, model, inputs, num_items_in_batch=None):
        texts = [row["prompt"] for row in inputs] if isinstance(inputs, list) else inputs["input_ids"]
        texts = [text if isinstance(text, str) else tokenizer.decode(text, skip_special_tokens=True) for text in texts]
        met.extend(text.split()[1] for text in texts)
        return training_step(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(Trainer, "training_step", spy)
    orders, held_out = {}, {}
    for method, overrides in OVERRIDES.items():
        met.clear()
        trainer = train(quietly(run_file, overrides)).trainer
        orders[method] = list(dict.fromkeys(met))
        rows = trainer.eval_dataset
        texts = rows["prompt"] if "prompt" in rows.column_names else tokenizer.batch_decode(rows["input_ids"][:], True)
        held_out[method] = {text.split()[1] for text in texts}
    assert len(orders["plain"]) == 10
    for method in OVERRIDES:
        assert orders[method] == orders["plain"] and len(held_out[method]) == 2
        assert not held_out[method] & set(orders["plain"])


def test_plain_fine_tuning_learns_the_completion_alone(run_file, tiny_llama_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    steps = ["rl=", "max_steps=1", "gradient_accumulation_steps=10", "micro_batch_size=1"]
    losses = [train(quietly(run_file, [*steps, f"train_on_inputs={on}"])).metrics for on in ("false", "true")]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    config = quietly(run_file, ["rl="])
    from ebft.data.load import load_datasets

    nll = {False: [], True: []}
    for row in load_datasets(config, tokenizer)[0]:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logp = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        nll[True] += (-logp).tolist()
        nll[False] += (-logp)[row["prompt_length"] - 1 :].tolist()
        assert row["input_ids"][-1] == tokenizer.eos_token_id
    for metrics, on in zip(losses, (False, True)):
        assert metrics["loss"] == pytest.approx(sum(nll[on]) / len(nll[on]), rel=1e-4)


def test_the_base_model_is_evaluated_before_the_first_step_and_compared_with_the_trained_one(run_file):
    overrides = ["rl=", "eval_on_start=true", "eval_strategy=steps", "eval_steps=1", "max_steps=1"]
    result = train(quietly(run_file, overrides))
    log = result.trainer.state.log_history
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [0, 1]
    assert "First and last evaluation (steps 0 and 1)" in result.outcome and "already followed" not in result.outcome
    unevaluated = train(quietly(run_file, ["rl=", "eval_strategy=no", "max_steps=1"]))
    assert "val_set_size" not in unevaluated.outcome and "ebft evaluate" in unevaluated.outcome


@pytest.mark.parametrize("override", ["rl=", "rl=null"])
def test_unsetting_rl_is_plain_fine_tuning_with_one_warning_for_sections(run_file, override):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(run_file, [override])
    assert config.rl is None
    assert [str(w.message).partition(",")[0] for w in caught] == ["ebft"]
