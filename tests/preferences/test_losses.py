"""Losses and metrics against formulas written out here, with one forward pass for each sequence."""

import math
import warnings

import pytest
import torch
from peft import PeftModel
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ebft.errors import DataError
from ebft.models import load, pretrained
from ebft.run.trainer import build_trainer, training_arguments
from ebft.run.training import arranged, run_rows
from tests.preferences.runs import TRAINERS, WITH_REFERENCE, config_of, trained, write_inputs
from tests.strided import families, test_exactness
from tests.structured.conftest import make_chat_tokenizer

BETA = 0.3
SIDES = ("chosen", "rejected")


def trainer_of(method, folder, adapter=True, **changes):
    """A trainer whose policy is not its reference model, in eval mode."""
    config = config_of(method, folder, adapter, **{"rl_beta": BETA, "micro_batch_size": 4} | changes)
    with warnings.catch_warnings(action="ignore"):
        tokenizer = pretrained.load_tokenizer(config)
        rows, held_out = arranged(config, run_rows(config, tokenizer), load.load_model_config(config))
        args = training_arguments(config, rows=len(rows), has_eval=held_out is not None)
        trainer = build_trainer(config, args, load.load_model(config, tokenizer), tokenizer, rows, held_out)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    trainer.model.eval()
    return trainer


def logp(model, prompt, completion):
    """The log-probabilities of the tokens of a completion, one after the other."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].double()
    at = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return torch.stack([logits[place].log_softmax(-1)[token] for place, token in zip(at, completion)])


def models(trainer, folder):
    """Plain forward passes of the policy and of the base model."""
    return trainer.model, AutoModelForCausalLM.from_pretrained(folder / "model").eval()


def loss_of(trainer, rows):
    inputs = trainer._prepare_inputs(trainer.data_collator(rows))
    with torch.no_grad():
        return trainer.compute_loss(trainer.model, inputs).item()


def sides(model, row):
    return [logp(model, row["prompt_ids"], row[f"{side}_ids"]) for side in SIDES]


def ratios(policy, base, row):
    """The log-probability of each token of the chosen and of the rejected completion, minus that of the reference."""
    return [ours - theirs for ours, theirs in zip(sides(policy, row), sides(base, row))]


def pair_loss(method, policy, base, row, dpo_loss_type="sigmoid", dpo_use_weighting=False, simpo_gamma=0.5, **others):
    """The loss of a pair with the settings of a run, without means over tokens."""
    if method in ("orpo", "simpo"):
        good, bad = (each.mean() for each in sides(policy, row))
        if method == "simpo":
            return -F.logsigmoid(BETA * (good - bad) - simpo_gamma)
        odds = [mean - torch.log(1 - mean.exp()) for mean in (good, bad)]
        return -BETA * F.logsigmoid(odds[0] - odds[1])
    chosen, rejected = ratios(policy, base, row)
    difference, of_means = BETA * (chosen.sum() - rejected.sum()), chosen.mean() - rejected.mean()
    if method == "ipo":
        return (of_means - 1 / (2 * BETA)) ** 2
    one, share = -F.logsigmoid(difference), torch.sigmoid(difference)
    if dpo_use_weighting:
        return one * torch.exp(sum(weight(policy, row["prompt_ids"], row[f"{side}_ids"]) for side in SIDES))
    return {
        "sigmoid_norm": -F.logsigmoid(BETA * of_means),
        "exo_pair": share * (share / 0.9).log() + (1 - share) * ((1 - share) / 0.1).log(),
        "sigmoid hinge": one + 0.25 * torch.relu(1 - difference),
    }.get(dpo_loss_type if isinstance(dpo_loss_type, str) else " ".join(dpo_loss_type), one)


PRECOMPUTED = {"precompute_ref_log_probs": True}


@pytest.mark.first(5)
@pytest.mark.parametrize(("method", "adapter", "changes"), [
    ("dpo", True, {}), ("dpo", False, {}), ("ipo", True, {}), ("ipo", False, {}),
    ("dpo", True, PRECOMPUTED), ("dpo", False, PRECOMPUTED),
    ("dpo", True, {"dpo_use_weighting": True}), ("dpo", False, {"dpo_use_weighting": True}),
    ("dpo", False, {"dpo_loss_type": ["sigmoid", "hinge"], "dpo_loss_weights": [1.0, 0.25]}),
    ("dpo", True, {"dpo_loss_type": "exo_pair", "dpo_label_smoothing": 0.1}),
    ("dpo", True, {"dpo_loss_type": "sigmoid_norm"}),
    # Modules that are trained fully are those of the base model in the reference.
    ("dpo", True, {"lora_modules_to_save": ["embed_tokens", "norm"]}),
    ("ipo", True, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}),
    ("dpo", True, {"lora_modules_to_save": ["lm_head"], **PRECOMPUTED}),
])  # fmt: skip
def test_pairs_with_a_reference(method, adapter, changes, tmp_path):
    trainer = trainer_of(method, write_inputs(tmp_path), adapter, **changes)
    rows = [trainer.train_dataset[index] for index in range(4)]
    policy, base = models(trainer, tmp_path)
    expected = torch.stack([pair_loss(method, policy, base, row, **changes) for row in rows])
    assert loss_of(trainer, rows) == pytest.approx(expected.mean().item(), rel=2e-4)
    chosen, rejected = zip(*(ratios(policy, base, row) for row in rows))
    margins = BETA * torch.stack([good.sum() - bad.sum() for good, bad in zip(chosen, rejected)])
    assert margins.abs().min() > 1e-3
    assert trainer.logged("eval")["rewards/margins"] == pytest.approx([margins.mean().item()], rel=1e-3)
    assert trainer.logged("eval")["rewards/accuracies"] == pytest.approx([(margins > 0).double().mean().item()])


def test_the_reference_of_a_continued_adapter_has_its_modules(tmp_path):
    trained("dpo", write_inputs(tmp_path), lora_modules_to_save=["embed_tokens", "lm_head"], max_steps=1)
    trainer = trainer_of("dpo", tmp_path, lora_model_dir=str(tmp_path / "out"))
    rows = [trainer.train_dataset[index] for index in range(4)]
    policy, base = models(trainer, tmp_path)
    reference = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    losses = torch.stack([pair_loss("dpo", policy, reference, row) for row in rows])
    assert loss_of(trainer, rows) == pytest.approx(losses.mean().item(), rel=2e-4)
    assert (losses - math.log(2)).abs().min() > 5e-4  # the policy is not the reference


def weight(model, prompt, completion):
    """The mean over tokens of log p minus the log of the probability that two samples are equal."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double()
    logps = logits.log_softmax(-1)
    chosen = logps[range(len(completion)), completion]
    return (chosen - (2 * logps).logsumexp(-1)).mean()


@pytest.mark.parametrize(("adapter", "changes"), [
    (True, {}), (False, {}), (True, PRECOMPUTED), (True, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}),
])  # fmt: skip
def test_kto(adapter, changes, tmp_path):
    weights = {"kto_desirable_weight": 2.0, "kto_undesirable_weight": 0.5, **changes}
    trainer = trainer_of("kto", write_inputs(tmp_path), adapter, **weights)
    rows = [trainer.train_dataset[index] for index in range(4)]
    assert {row["label"] for row in rows} == {True, False}
    policy, base = models(trainer, tmp_path)
    first, second = (row["completion_ids"] for row in rows[:2])
    assert first != second

    def ratio(prompt, ids):
        return (logp(policy, prompt, ids) - logp(base, prompt, ids)).sum()

    def expected(rows, others):
        divergence = torch.stack([ratio(row["prompt_ids"], ids) for row, ids in zip(rows, others)]).mean().clamp(min=0)
        losses = []
        for row in rows:
            found = ratio(row["prompt_ids"], row["completion_ids"])
            sign, scale = (1, 2.0) if row["label"] else (-1, 0.5)
            losses.append(scale * (1 - torch.sigmoid(sign * BETA * (found - divergence))))
        return torch.stack(losses).mean().item()

    others = [rows[index - 1]["completion_ids"] for index in range(4)]
    assert loss_of(trainer, rows) == pytest.approx(expected(rows, others), rel=2e-4)
    if not changes.get("precompute_ref_log_probs"):  # which pairs rows before training
        for row, other in ((rows[0], second), (rows[1], first), (rows[3], first)):  # batches of one row
            assert loss_of(trainer, [row]) == pytest.approx(expected([row], [other]), rel=2e-4)


@pytest.mark.parametrize("precompute", [False, True])
def test_the_last_row_of_kto_is_compared_with_another_one(precompute, tmp_path):
    """Seven rows in batches of three, in training and in evaluation: no row has its own completion in the KL term."""
    rows = [{"question": "Hi", "completion": letter * 3, "label": letter < "D"} for letter in "ABCDEFG"]
    write_inputs(tmp_path, [*rows, {**rows[0], "completion": "held out"}])
    keys = {"micro_batch_size": 3, "val_set_size": 1, "precompute_ref_log_probs": precompute}
    trainer = trainer_of("kto", tmp_path, **keys)
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (7, 1)
    for loader, sizes in ((trainer.get_train_dataloader(), [3, 3, 1]), (trainer.get_eval_dataloader(), [1])):
        batches = list(loader)
        assert [len(batch["input_ids"]) for batch in batches] == sizes
        for batch in batches:
            own, others = (completions(batch, kind) for kind in ("", "KL_"))
            assert all(one != other for one, other in zip(own, others, strict=True))


def completions(batch, kind):
    masks = batch[f"{kind}completion_mask"].bool()
    return [ids[mask].tolist() for ids, mask in zip(batch[f"{kind}input_ids"], masks)]


def test_kto_needs_a_second_row(tmp_path):
    write_inputs(tmp_path, [{"question": "Hi", "completion": "Yes", "label": True}])
    with pytest.raises(DataError, match="one training row, but the KL term .* other rows"):
        trainer_of("kto", tmp_path)


@pytest.mark.parametrize("method", TRAINERS)
def test_a_held_out_metric_counts_every_row_once(method, tmp_path):
    """Three rows in batches of two: the last batch has one row."""
    trainer = trainer_of(method, write_inputs(tmp_path), val_set_size=3, eval_batch_size=2)
    found = trainer.evaluate()
    rows = list(trainer.eval_dataset)
    policy, base = models(trainer, tmp_path)

    def reward(row, name):
        logps = logp(policy, row["prompt_ids"], row[name])
        if method in WITH_REFERENCE:
            return BETA * (logps - logp(base, row["prompt_ids"], row[name])).sum()
        return BETA * logps.mean()

    if method == "kto":
        good, bad = ([reward(row, "completion_ids") for row in rows if row["label"] is kind] for kind in (True, False))
        margin = torch.stack(good).mean() - torch.stack(bad).mean()
    else:
        margins = torch.stack([reward(row, "chosen_ids") - reward(row, "rejected_ids") for row in rows])
        margin = margins.mean()
        assert found["eval_rewards/accuracies"] == pytest.approx((margins > 0).double().mean().item())
    assert found["eval_rewards/margins"] == pytest.approx(margin.item(), rel=1e-3, abs=1e-5)
    config = config_of(method, tmp_path)
    assert {f"eval_{name}" for name in config.method.held_out_metrics(config)} <= found.keys()


def token_mean(method, policy, rows):
    """The cross-entropy of chosen tokens, with ORPO also of those of prompts."""
    losses = []
    for row in rows:
        prompt, completion = row["prompt_ids"], row["chosen_ids"]
        if method == "orpo":
            prompt, completion = prompt[:1], prompt[1:] + completion
        losses.append(-logp(policy, prompt, completion))
    return torch.cat(losses).mean().item()


# Losses with a mean over tokens, and its weight.
WITH_TOKENS = [
    ("orpo", True, {"rl_beta": None, "orpo_alpha": BETA}, 1.0), ("orpo", False, {}, 1.0),
    ("simpo", True, {"cpo_alpha": 0.5}, 0.5), ("simpo", False, {"cpo_alpha": 0.2, "simpo_gamma": 0.7}, 0.2),
    ("dpo", True, {"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.7]}, 0.7),
]  # fmt: skip


@pytest.mark.parametrize(("method", "adapter", "changes", "weight"), WITH_TOKENS)
def test_losses_with_a_mean_over_tokens_in_batches_of_any_size(method, adapter, changes, weight, tmp_path):
    """Five rows of unequal lengths: the cross-entropy is a mean over tokens, the rest one over rows."""
    trainer = trainer_of(method, write_inputs(tmp_path), adapter, val_set_size=5, **changes)
    rows, (policy, base) = list(trainer.eval_dataset), models(trainer, tmp_path)
    losses = [pair_loss(method, policy, base, row, **changes).item() for row in rows]
    for count in (1, 4):  # outside of an evaluation
        expected = sum(losses[:count]) / count + weight * token_mean(method, policy, rows[:count])
        assert loss_of(trainer, rows[:count]) == pytest.approx(expected, rel=1e-5)
    tokens = token_mean(method, policy, rows)
    for size in (1, 2, 3, 5):
        trainer.args.per_device_eval_batch_size = size
        assert len(trainer.get_eval_dataloader()) == math.ceil(5 / size)
        found = trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(sum(losses) / 5 + weight * tokens, rel=1e-5)
        assert found.get("eval_nll_loss", tokens) == pytest.approx(tokens, rel=1e-5)


@pytest.mark.parametrize("method", TRAINERS)
def test_the_loss_of_a_mixture_of_experts_has_no_term_for_the_router(method, tmp_path):
    write_inputs(tmp_path)
    found = []
    for settings in ({"router_aux_loss_coef": 0.0}, {"router_aux_loss_coef": 100.0, "output_router_logits": True}):
        experts = {"vocab_size": len(make_chat_tokenizer()), "max_position_embeddings": 512, "eos_token_id": 1}
        families.tiny_model("mixtral", seed=1, **experts, **settings).save_pretrained(tmp_path / "model")
        trainer = trainer_of(method, tmp_path, adapter=False, torch_dtype="float32")
        found.append(loss_of(trainer, [trainer.train_dataset[index] for index in range(4)]))
        assert "aux_loss" not in trainer.logged("eval")
    assert found[0] == found[1]


FAST = ("qwen3_5_text", "nemotron_h")
STATES = [*families.RUNNING_STATE, "recurrent_gemma", "minimax"]  # the last two pad on the right only


@pytest.mark.parametrize("family", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in STATES])
def test_padding_is_not_part_of_a_running_state(family, tmp_path):
    """Loss and gradients of padded rows, against one forward pass for each sequence."""
    write_inputs(tmp_path)
    sizes = {"vocab_size": len(make_chat_tokenizer()), "max_position_embeddings": 256, "eos_token_id": 1}
    families.tiny_model(family, **sizes).save_pretrained(tmp_path / "model")
    trainer = trainer_of("dpo", tmp_path, adapter=False)
    rows = [trainer.train_dataset[index] for index in range(4)]
    plain = AutoModelForCausalLM.from_config(trainer.model.config)  # TRL has changed the methods of the trainer's
    plain.load_state_dict(trainer.model.state_dict())
    _, base = models(trainer, tmp_path)

    def total(model, prompt, completion):
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).sum()

    def ratio(row, side):
        given = row["prompt_ids"], row[f"{side}_ids"]
        return total(plain.eval(), *given) - total(base, *given).detach()

    expected = torch.stack([-F.logsigmoid(BETA * (ratio(row, "chosen") - ratio(row, "rejected"))) for row in rows])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(trainer.data_collator(rows)))
    torch.testing.assert_close(loss.detach(), expected.mean().detach(), atol=1e-4, rtol=1e-4)
    loss.backward()
    expected.mean().backward()
    test_exactness.compare_gradients(trainer.model, plain)
