"""Reward models: the loss against a naive one, what is saved, and the held-out metrics."""

import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ebft import train
from ebft.errors import ConfigError
from ebft.reward_models import pair_losses
from tests.reward_models.conftest import KINDS, LORA, PAIRS


def score(model, ids: list[int]) -> torch.Tensor:
    """The score of one text without padding: the head on the hidden state of its last token."""
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    return model.score(hidden)[0]


def naive_loss(model, rows, centring=0.0) -> torch.Tensor:
    """The mean over pairs of -log(1 / (1 + exp(rejected - chosen))), and of the squared sum of the scores."""
    total = torch.zeros(())
    for row in rows:
        chosen, rejected = score(model, row["chosen_ids"]), score(model, row["rejected_ids"])
        total = total + torch.log(1 + torch.exp(rejected - chosen)) + centring * (chosen + rejected) ** 2
    return total / len(rows)


def test_the_terms_of_the_loss():
    found = pair_losses(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0]), 0.1)
    expected = [math.log(1 + math.exp(-0.5)) + 0.1 * 2.25, math.log(1 + math.exp(3.0)) + 0.1 * 1.0]
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("centring", [None, 0.3])
def test_loss_and_gradients_are_those_of_single_texts(make, centring):
    trainer = train(make("outcome", center_rewards_coefficient=centring, max_steps=1)).trainer
    rows = [trainer.train_dataset[index] for index in range(4)]
    assert len({len(row[name]) for row in rows for name in ("chosen_ids", "rejected_ids")}) > 3
    model = trainer.model.train()
    trainer.compute_loss(model, trainer.data_collator(rows)).backward()
    fast = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    loss = trainer.compute_loss(model, trainer.data_collator(rows)).item()
    model.zero_grad()
    naive = naive_loss(model, rows, centring or 0.0)
    naive.backward()
    assert loss == pytest.approx(naive.item(), rel=1e-5)
    assert {"score.weight", "model.embed_tokens.weight"} <= set(fast)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(fast[name], weight.grad, rtol=1e-3, atol=1e-6)


def test_held_out_metrics_are_means_over_pairs(make):
    trainer = train(make("outcome")).trainer  # three held-out pairs in batches of two and one
    metrics, rows = trainer.evaluate(), list(trainer.eval_dataset)
    model = trainer.model.eval()
    with torch.no_grad():
        differences = [(score(model, row["chosen_ids"]) - score(model, row["rejected_ids"])).item() for row in rows]
        assert metrics["eval_loss"] == pytest.approx(naive_loss(model, rows).item(), rel=1e-5)
    assert len(differences) == 3
    assert metrics["eval_margin"] == pytest.approx(sum(differences) / 3, rel=1e-4)
    assert metrics["eval_accuracy"] == pytest.approx(sum(value > 0 for value in differences) / 3)
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 2] and logged[0]["eval_accuracy"] == metrics["eval_accuracy"]


def test_margins_are_those_of_the_loss_of_trl(make, monkeypatch):
    margins = [0.5 * (index % 4) for index in range(len(PAIRS))]
    pairs = [{**pair, "margin": margin} for pair, margin in zip(PAIRS, margins)]
    monkeypatch.setitem(KINDS, "outcome", (KINDS["outcome"][0], pairs, KINDS["outcome"][2]))
    trainer = train(make("outcome", max_steps=1)).trainer
    model, rows = trainer.model.eval(), [trainer.train_dataset[index] for index in range(4)]
    assert trainer.compute_loss(model, trainer.data_collator(rows)).item() == pytest.approx(
        with_margins(model, rows), rel=1e-5
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(with_margins(model, list(trainer.eval_dataset)), rel=1e-5)


def with_margins(model, rows) -> float:
    """The mean over pairs of -log(sigmoid(chosen - rejected - margin))."""
    assert sum(row["margin"] for row in rows) > 0
    with torch.no_grad():
        scores = [(score(model, row["chosen_ids"]).item(), score(model, row["rejected_ids"]).item()) for row in rows]
    terms = [math.log(1 + math.exp(no + row["margin"] - yes)) for (yes, no), row in zip(scores, rows, strict=True)]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_the_saved_model_gives_the_scores_of_the_trained_one(make, adapter, tmp_path):
    trainer = train(make("outcome", **adapter)).trainer
    ids = trainer.train_dataset[0]["chosen_ids"]
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=1).eval()
    with torch.no_grad():
        found, expected = (model(torch.tensor([ids])).logits.item() for model in (saved, trainer.model.eval()))
    assert found == pytest.approx(expected, rel=1e-5)


def test_an_adapter_trains_the_whole_head_and_does_not_adapt_it(make):
    model = train(make("outcome", **LORA)).trainer.model
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    heads = {name for name in trained if "score" in name}
    assert heads == {"base_model.model.score.modules_to_save.default.weight"}
    assert any("lora_A" in name for name in trained)
    assert model.active_peft_config.task_type == "SEQ_CLS"


def test_training_separates_the_pairs(make):
    log = train(make("outcome", max_steps=20, learning_rate=5e-3)).trainer.state.log_history
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


def test_an_adapter_of_a_language_model_is_refused_before_a_model_is_loaded(make, tmp_path):
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    config = make("outcome", adapter="lora", lora_model_dir=str(tmp_path), base_model="does/not-exist")
    with pytest.raises(ConfigError, match="is an adapter of a language model, but this run trains a reward model"):
        train(config)
