"""Gradient norms of the two terms: those of runs on one term alone, and without effect on training."""

import pytest

from tests.strided.families import tiny_model
from tests.strided.test_exactness import with_lora
from tests.strided.test_trainer import ROWS, logged, make

TERMS = {"rl_coef": 0.7, "ce_coef": 0.3}


@pytest.mark.first(1)
@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("single_pass", [True, False])
def test_norms_are_those_of_runs_on_one_term(adapter, single_pass, tmp_path):
    """The first step of each run has the same rollouts. A term without weight has the norm zero."""
    options = {"grad_norms_every": 1, "gradient_accumulation_steps": 2, "max_steps": 1, "max_grad_norm": 1e-3}
    first = {}
    for absent in (None, "rl", "ce"):
        model = with_lora(tiny_model("llama")) if adapter else tiny_model("llama")
        terms = {**TERMS, f"{absent}_coef": 0.0} if absent else TERMS
        trainer = make(tmp_path, model, ROWS, single_pass=single_pass, **terms, **options)
        trainer.train()
        first[absent] = trainer.state.log_history[0]
    for term, absent in (("rl", "ce"), ("ce", "rl")):
        assert first[None][f"ebft/{term}_grad_norm"] == pytest.approx(first[absent]["grad_norm"], rel=1e-4)
        assert first[absent][f"ebft/{term}_grad_norm"] == pytest.approx(first[absent]["grad_norm"], rel=1e-5)
        assert first[absent][f"ebft/{absent}_grad_norm"] == 0.0 < first[absent]["grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"single_pass": True}, {"single_pass": False}, {"gradient_checkpointing": True}, {"rollout_tokens_per_pass": 60},
], ids=str)  # fmt: skip
def test_training_is_the_same_with_and_without(options, tmp_path):
    """Equal parameters to the last bit, equal budgets, and no norms in steps without them."""
    runs = {}
    for every in (0, 2):
        model = with_lora(tiny_model("llama"))
        trainer = make(tmp_path / str(every), model, ROWS, grad_norms_every=every, **TERMS, **options)
        trainer.train()
        runs[every] = dict(model.named_parameters()), logged(trainer)
    assert ["ebft/rl_grad_norm" in entry for entry in runs[0][1]] == [False] * 4
    assert ["ebft/rl_grad_norm" in entry for entry in runs[2][1]] == [False, True, False, True]
    assert all(a.equal(runs[2][0][name]) for name, a in runs[0][0].items())
    for entry, other in zip(runs[0][1], runs[2][1]):
        assert all(entry[key] == other[key] for key in ("loss", "grad_norm", "budget/flops"))
