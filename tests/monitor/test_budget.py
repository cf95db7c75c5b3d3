"""What a run has spent: logged with the loss, going on after resuming, and ending the run where it is told to."""

import pytest
import torch

from ebft.config.keys.run import BudgetSection
from ebft.monitor.budget import StopAtBudget
from tests.monitor.sft_run import plain_trainer
from tests.strided.families import tiny_model
from tests.strided.test_trainer import make as make_strided

NAMES = ("budget/documents", "budget/generated_tokens", "budget/flops")


def entries(trainer):
    return [entry for entry in trainer.state.log_history if "budget/flops" in entry]


def test_totals_are_logged_with_the_loss_and_at_the_end(tmp_path):
    """Evaluations are free."""
    flops = []
    evaluates = {"evaluation": [{"input_ids": list(range(3, 12))}] * 4, "eval_strategy": "steps", "eval_steps": 1}
    for keys in ({}, evaluates):
        keys = {"logging_steps": 2, "gradient_accumulation_steps": 2, **keys}
        trainer = plain_trainer(tmp_path, tiny_model("llama"), **keys)
        trainer.train()
        found = entries(trainer)
        assert [(entry["step"], entry["budget/documents"]) for entry in found] == [(2, 8), (3, 12)]
        assert all(entry["budget/generated_tokens"] == 0 and entry["budget/flops"] > 0 for entry in found)
        flops.append([entry["budget/flops"] for entry in found] + [trainer.state.total_flos])
    assert flops[0] == flops[1] and flops[0][-1] == flops[0][-2]


def test_strided_counts_documents_and_sampled_tokens(tmp_path):
    rows = [{"input_ids": list(range(3, 27))}] * 8
    options = {"stride": 4, "context_length": 4, "generate_max_len": 3, "n_samples_per_prompt": 2}
    trainer = make_strided(tmp_path, tiny_model("llama"), train=rows, max_steps=2, **options)
    trainer.train()
    blocks = 5  # anchors 4, 8, 12, 16, 20 of 24 tokens
    spent = [tuple(entry[name] for name in NAMES[:2]) for entry in entries(trainer)][:2]
    assert spent == [(2, 2 * blocks * 2 * 3), (4, 4 * blocks * 2 * 3)]


def test_a_compiled_model_logs_no_flops(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, *args, **kwargs: model)
    trainer = plain_trainer(tmp_path, tiny_model("llama"), torch_compile=True, max_steps=1)
    trainer.train()
    assert "budget/flops" not in trainer.state.log_history[0] and trainer.state.log_history[0]["budget/documents"] == 2


@pytest.mark.parametrize(("limits", "step"), [({"documents": 3}, 2), ({"flops": 1.0}, 1), ({"documents": 99}, 3)])
def test_a_limit_ends_training(tmp_path, capsys, limits, step):
    trainer = plain_trainer(tmp_path, tiny_model("llama"), logging_steps=50, save_strategy="steps", save_steps=50)
    trainer.add_callback(StopAtBudget(trainer.budget, BudgetSection(**limits)))
    trainer.train()
    assert trainer.state.global_step == step
    ((name, limit),), spent, said = limits.items(), entries(trainer)[-1], capsys.readouterr().out
    if step == 3:
        assert "Stopping" not in said
        return
    assert f"Stopping at step {step}: budget.{name} {limit:,} is reached ({spent[f'budget/{name}']:,})" in said
    assert "loss" in spent or "loss" in entries(trainer)[-2]
    assert (tmp_path / f"checkpoint-{step}").is_dir()
