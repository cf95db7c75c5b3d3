"""Every field of StridedOutput, and the gradient of the loss, against the naive oracle."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from tests.strided.families import FAMILIES, VOCAB, tiny_model
from tests.strided.oracle import oracle_step

BASE = {
    "stride": 5,
    "context_length": 4,
    "generate_max_len": 4,
    "n_samples_per_prompt": 3,
    "temperature": 0.7,
    "feature_layers": [0.0, 0.5, 0.75],
    "ce_coef": 0.3,
    "use_whitening": False,
    "min_completion_prefix": 2,
}


def make_trainer(model, tmp_path, **changes):
    arguments = {**BASE, **changes}
    args = StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], seed=3, **arguments)
    return StridedEBFTTrainer(model=model, args=args)


def unequal_batch(seed=0):
    """Three rows: plain text, prompt and completion, and a short text; right-padded, with padding ids that matter."""
    generator = torch.Generator().manual_seed(seed)
    lengths, prompts = [27, 22, 13], [0, 7, 0]
    input_ids = torch.randint(3, VOCAB, (3, 27), generator=generator)
    mask = torch.arange(27) < torch.tensor(lengths)[:, None]
    labels = input_ids.masked_fill(~mask, -100)
    labels[1, :7] = -100
    rows = [
        (input_ids[r, : lengths[r]], prompts[r], range(max(prompts[r], 1), lengths[r])) for r in range(len(lengths))
    ]
    inputs = {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "labels": labels,
        "prompt_length": torch.tensor(prompts),
    }
    return inputs, rows


def with_lora(model, seed=1):
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model


def compare(trainer, plain, inputs, rows, grads=True):
    trainer.model.train()
    loss, out = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    options = trainer.args
    # A copy of the policy that no strided code has touched; features come from the frozen base.
    expected = oracle_step(plain, rows, out.rollouts, options)
    blocks = [len(a) for a in expected.anchors]
    assert out.block_mask.sum(1).tolist() == blocks
    for r, anchors in enumerate(expected.anchors):
        assert out.anchors[r, : blocks[r]].tolist() == anchors
        assert out.anchors[r, blocks[r] :].eq(0).all()
        for b in range(blocks[r]):
            for j in range(options.n_samples_per_prompt):
                torch.testing.assert_close(out.logps[r, j, b], expected.logps[r, b, j].detach(), atol=1e-4, rtol=0)
            for name in ("alignment", "diversity", "rewards", "advantages"):
                ours, theirs = getattr(out, name)[r, :, b], getattr(expected, name)[r, b].float()
                torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(out.cfm[r, b], expected.cfm[r, b].float(), atol=1e-3, rtol=1e-3)
        for name in ("rollouts", "logps", "alignment", "diversity", "rewards", "advantages"):
            assert getattr(out, name)[r, :, blocks[r] :].eq(0).all()
        assert out.cfm[r, blocks[r] :].eq(0).all()
    for name in ("rl_loss", "ce_loss", "loss"):
        torch.testing.assert_close(getattr(out, name), getattr(expected, name).detach(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(loss.detach(), out.loss)
    if grads:
        loss.backward()
        expected.loss.backward()
        compare_gradients(trainer.model, plain)
    return out


def compare_gradients(model, plain):
    ours = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    theirs = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    scale = torch.cat([g.flatten() for g in theirs.values() if g is not None]).norm()
    assert scale > 1e-3
    total = 0.0
    for name, expected in theirs.items():
        if expected is None:
            assert ours[name] is None or ours[name].norm() < 1e-6 * scale, name
            continue
        total += (ours[name] - expected).square().sum()
        assert (ours[name] - expected).norm() <= 1e-3 * max(expected.norm(), 0.02 * scale), name
    assert total.sqrt() <= 1e-3 * scale


class OraclePolicy(SimpleNamespace):
    """A full model and its frozen copy, told apart as an adapter would be: features come from the copy."""


@pytest.mark.parametrize("family", list(FAMILIES))
def test_family_with_lora(family, tmp_path):
    model = with_lora(tiny_model(family))
    plain = copy.deepcopy(model)
    inputs, rows = unequal_batch()
    compare(make_trainer(model, tmp_path, use_whitening=False), plain, inputs, rows)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2", "gemma3_text"])
def test_family_full_fine_tuning(family, tmp_path):
    model = tiny_model(family)
    plain = copy.deepcopy(model)
    inputs, rows = unequal_batch(1)
    compare(make_trainer(model, tmp_path), plain, inputs, rows)
