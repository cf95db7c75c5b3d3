"""Reward models: losses against naive ones, with one forward pass for each text or step; what is saved, and metrics."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from ebft import train
from tests.golden.runs import LORA
from tests.reward_models.conftest import KINDS, PAIRS

SAVED = {"outcome": AutoModelForSequenceClassification, "process": AutoModelForTokenClassification}


def head(model, ids: list[int]) -> torch.Tensor:
    """The head on the hidden state of the last token of a text without padding."""
    return model.score(model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1])


def naive(kind, model, rows, centring=0.0) -> tuple[torch.Tensor, list[bool]]:
    """The loss, and which pairs or steps are right, from rows that are cut after each step."""
    losses, right = [], []
    for row in rows:
        if kind == "outcome":
            chosen, rejected = head(model, row["chosen_ids"])[0], head(model, row["rejected_ids"])[0]
            loss = torch.log(1 + torch.exp(rejected - chosen + row.get("margin", 0.0)))
            losses.append(loss + centring * (chosen + rejected) ** 2)
            right.append((chosen - rejected).item())
        else:
            for index, label in enumerate(row["labels"]):
                if label != -100:
                    logits = head(model, row["input_ids"][: index + 1])
                    losses.append(logits.exp().sum().log() - logits[label])
                    right.append(logits.argmax().item() == label)
    return torch.stack(losses).mean(), right


@pytest.mark.parametrize(("kind", "centring"), [("outcome", None), ("outcome", 0.3), ("process", None)])
def test_loss_and_gradients_are_those_of_single_texts(make, kind, centring):
    keys = {"center_rewards_coefficient": centring} if kind == "outcome" else {}
    trainer = train(make(kind, max_steps=1, **keys)).trainer
    rows = [trainer.train_dataset[index] for index in range(5)]
    names = ("chosen_ids", "rejected_ids") if kind == "outcome" else ("input_ids",)
    assert len({len(row[name]) for row in rows for name in names}) > 2
    model = trainer.model.train()
    trainer.compute_loss(model, trainer.data_collator(rows)).backward()
    fast = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    loss = trainer.compute_loss(model, trainer.data_collator(rows)).item()
    model.zero_grad()
    expected, _ = naive(kind, model, rows, centring or 0.0)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert {"score.weight", "model.embed_tokens.weight"} <= set(fast)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(fast[name], weight.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_held_out_metrics_and_what_is_saved(make, kind, adapter, tmp_path):
    labels = {"num_labels": 3} if kind == "process" else {}
    keys = labels or {"center_rewards_coefficient": 0.3}
    trainer = train(make(kind, **keys, **adapter)).trainer  # three held-out rows in batches of two and one
    metrics, rows, model = trainer.evaluate(), list(trainer.eval_dataset), trainer.model.eval()
    ids = torch.tensor([trainer.train_dataset[0]["chosen_ids" if kind == "outcome" else "input_ids"]])
    saved = SAVED[kind].from_pretrained(tmp_path / "out", num_labels=labels.get("num_labels", 1)).eval()
    with torch.no_grad():
        torch.testing.assert_close(saved(ids).logits, model(ids).logits)
        loss, right = naive(kind, saved, rows, 0.3)
    assert len(rows) == 3 and saved(ids).logits.shape[-1] == labels.get("num_labels", 1)
    assert metrics["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(sum(value > 0 for value in right) / len(right))
    if kind == "outcome":
        assert metrics["eval_margin"] == pytest.approx(sum(right) / 3, rel=1e-4)
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 2] and logged[0]["eval_accuracy"] == metrics["eval_accuracy"]
    if adapter:  # the whole head is trained, and not adapted
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        parts = ["weight"] if kind == "outcome" else ["weight", "bias"]
        heads = {f"base_model.model.score.modules_to_save.default.{part}" for part in parts}
        assert {name for name in trained if "score" in name} == heads and any("lora_A" in name for name in trained)
        assert model.active_peft_config.task_type == {"outcome": "SEQ_CLS", "process": "TOKEN_CLS"}[kind]


def test_margins_are_those_of_the_loss_of_trl(make, monkeypatch):
    pairs = [{**pair, "margin": 0.5 * (index % 4)} for index, pair in enumerate(PAIRS)]
    monkeypatch.setitem(KINDS, "outcome", (KINDS["outcome"][0], pairs, KINDS["outcome"][2]))
    trainer = train(make("outcome", max_steps=1)).trainer
    model, rows = trainer.model.eval(), [trainer.train_dataset[index] for index in range(4)]
    with torch.no_grad():
        ours = [trainer.compute_loss(model, trainer.data_collator(rows)).item(), trainer.evaluate()["eval_loss"]]
        for found, of in zip(ours, (rows, list(trainer.eval_dataset))):
            assert sum(row["margin"] for row in of) > 0
            assert found == pytest.approx(naive("outcome", model, of)[0].item(), rel=1e-5)


@pytest.mark.parametrize(("kind", "size"), [("process", 1), ("outcome", 4)])
def test_accumulated_batches_give_the_loss_of_all_their_rows(kind, size, make):
    """Nine pairs as 4 + 4 + 1, and nine replies one by one."""
    split, whole = (train(make(kind, max_steps=1, micro_batch_size=size, gradient_accumulation_steps=count))
                    .trainer.state.log_history[0]
                    for size, count in ((size, -(-9 // size)), (9, 1)))  # fmt: skip
    for name in {"loss", "grad_norm", "accuracy", "margin"} & split.keys():
        assert split[name] == pytest.approx(whole[name], rel=1e-4), name
