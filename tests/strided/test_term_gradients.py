"""Gradient norms of the two terms: those of two naive backward passes, and without effect on training."""

import copy

import pytest

from tests.strided.families import tiny_model
from tests.strided.oracle import oracle_step
from tests.strided.test_exactness import with_lora
from tests.strided.test_trainer import ROWS, logged, make

TERMS = {"rl_coef": 0.7, "ce_coef": 0.3}


def recorded(trainer):
    """The batches of a run and what was computed from them, in a list that grows."""
    found, plain = [], trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False, **kwargs):
        loss, output = plain(model, inputs, return_outputs=True, **kwargs)
        found.append((inputs, output))
        return (loss, output) if return_outputs else loss

    trainer.compute_loss = compute_loss
    return found


def oracle_norms(model, batches, options):
    """Norms of two separate backward passes, each over the tokens of all batches."""
    terms, counts = {"rl": [], "ce": []}, {"rl": [], "ce": []}
    for inputs, output in batches:
        rows = []
        for ids, mask, prompt in zip(inputs["input_ids"], inputs["attention_mask"].bool(), inputs["prompt_length"]):
            rows.append((ids[mask], int(prompt), range(max(int(prompt), 1), int(mask.sum()))))
        step = oracle_step(model, rows, output.rollouts, options)
        for name in terms:
            terms[name].append(getattr(step, f"{name}_loss"))
        n, g = options.n_samples_per_prompt, options.generate_max_len
        counts["rl"].append(int(output.block_mask.sum()) * n * g)
        counts["ce"].append(sum(len(targets) for _, _, targets in rows))
    norms = {}
    for name, coef in (("rl", options.rl_coef), ("ce", options.ce_coef)):
        mean = sum(term * count for term, count in zip(terms[name], counts[name])) / sum(counts[name])
        model.zero_grad()
        (coef * mean).backward(retain_graph=True)
        norms[name] = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt().item()
    return norms


@pytest.mark.slow
@pytest.mark.parametrize("single_pass", [True, False])
@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_norms_are_those_of_two_backward_passes(adapter, single_pass, tmp_path):
    model = with_lora(tiny_model("llama")) if adapter else tiny_model("llama")
    options = {"grad_norms_every": 1, "gradient_accumulation_steps": 2, "max_steps": 1, "max_grad_norm": 1e-3}
    trainer = make(tmp_path, model, ROWS, single_pass=single_pass, **TERMS, **options)
    plain, batches = copy.deepcopy(model).eval(), recorded(trainer)
    trainer.train()
    assert len(batches) == 2
    expected = oracle_norms(plain, batches, trainer.args)
    for name, norm in expected.items():
        assert trainer.state.log_history[0][f"ebft/{name}_grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"single_pass": True}, {"single_pass": False}, {"gradient_checkpointing": True}, {"rollout_tokens_per_pass": 60}],
    ids=str,
)
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


@pytest.mark.parametrize(("absent", "present"), [("rl", "ce"), ("ce", "rl")])
def test_a_term_without_weight_has_the_norm_zero(absent, present, tmp_path):
    trainer = make(tmp_path, train=ROWS, grad_norms_every=1, max_steps=1, **{**TERMS, f"{absent}_coef": 0.0})
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry[f"ebft/{absent}_grad_norm"] == 0.0
    assert entry[f"ebft/{present}_grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-5)
