"""Process reward models: the loss against a naive one, what is saved, and the held-out metrics."""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from ebft import train
from tests.reward_models.conftest import LORA


def naive_losses(model, row) -> list[torch.Tensor]:
    """The cross-entropy of the class of each step, from a forward pass of its row alone, cut after the step."""
    found = []
    for index, label in enumerate(row["labels"]):
        if label != -100:
            hidden = model.model(input_ids=torch.tensor([row["input_ids"][: index + 1]])).last_hidden_state[0, -1]
            logits = model.score(hidden)
            found.append(logits.exp().sum().log() - logits[label])
    return found


def test_loss_and_gradients_are_those_of_single_steps(make):
    trainer = train(make("process", max_steps=1)).trainer
    rows = [trainer.train_dataset[index] for index in range(5)]
    assert len({len(row["input_ids"]) for row in rows}) > 2
    model = trainer.model.train()
    trainer.compute_loss(model, trainer.data_collator(rows)).backward()
    fast = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    loss = trainer.compute_loss(model, trainer.data_collator(rows)).item()
    model.zero_grad()
    steps = [step for row in rows for step in naive_losses(model, row)]
    naive = sum(steps) / len(steps)
    naive.backward()
    assert loss == pytest.approx(naive.item(), rel=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(fast[name], weight.grad, rtol=1e-3, atol=1e-6)


def test_accumulated_batches_give_the_loss_of_all_their_steps(make):
    losses = [
        train(make("process", max_steps=1, micro_batch_size=size, gradient_accumulation_steps=8 // size)).metrics
        for size in (1, 8)
    ]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-5)
    assert losses[0]["grad_norm"] == pytest.approx(losses[1]["grad_norm"], rel=1e-4)


def test_held_out_metrics_are_means_over_steps(make):
    trainer = train(make("process")).trainer
    metrics, rows, model = trainer.evaluate(), list(trainer.eval_dataset), trainer.model.eval()
    with torch.no_grad():
        losses = [step.item() for row in rows for step in naive_losses(model, row)]
        right = [
            model(torch.tensor([row["input_ids"]])).logits[0, index].argmax().item() == label
            for row in rows
            for index, label in enumerate(row["labels"])
            if label != -100
        ]
    assert len(rows) == 3 and len(losses) == len(right) > 3
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_the_saved_model_gives_the_classes_of_the_trained_one(make, adapter, tmp_path):
    trainer = train(make("process", num_labels=3, **adapter)).trainer
    ids = torch.tensor([trainer.train_dataset[0]["input_ids"]])
    saved = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", num_labels=3).eval()
    with torch.no_grad():
        found, expected = (model(ids).logits for model in (saved, trainer.model.eval()))
    assert found.shape == (1, ids.shape[1], 3)
    torch.testing.assert_close(found, expected)


def test_an_adapter_trains_the_whole_head(make):
    model = train(make("process", **LORA)).trainer.model
    heads = {name for name, weight in model.named_parameters() if weight.requires_grad and "score" in name}
    assert heads == {f"base_model.model.score.modules_to_save.default.{part}" for part in ("weight", "bias")}
    assert model.active_peft_config.task_type == "TOKEN_CLS"


def test_training_learns_the_classes(make):
    keys = {"val_set_size": 0, "eval_steps": None, "lr_scheduler": "constant"}
    log = train(make("process", max_steps=60, **keys)).trainer.state.log_history
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])  # the last epoch and the first
