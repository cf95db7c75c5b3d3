"""The flex_attention path against the oracle, by the kernel's definition: compiled kernels need a GPU (test_gpu.py)."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from ebft.prefix.attention import flex
from tests.strided.families import tiny_model
from tests.strided.test_exactness import compare, exact, make_trainer, unequal_batch
from tests.structured import oracle
from tests.structured.rollouts.test_local import contexts, later_turns, sample

CALLS = []


def dense_kernel(query, key, value, score_mod, block_mask, scale, enable_gqa, return_aux):
    """What flex_attention computes, with gradients, which PyTorch does not give on CPU."""
    CALLS.append(query.shape)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.mT * scale
    if score_mod is not None:
        scores = score_mod(scores, None, None, None, None)
    length = query.shape[2]
    seen = create_mask(block_mask.mask_mod, 1, 1, length, length, device=str(query.device))
    scores = scores.masked_fill(~seen, float("-inf"))
    output = scores.softmax(-1) @ value
    return output if return_aux is None else (output, SimpleNamespace(lse=scores.logsumexp(-1)))


@pytest.fixture
def on_any_device(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(flex, "available", lambda device: True)
    monkeypatch.setattr(flex, "_kernel", lambda compiled: dense_kernel)


def flexible(family):
    model = tiny_model(family)
    model.config._attn_implementation = "flex_attention"
    return model


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "llama4_text", "gemma3_text"])
def test_step(family, checkpoints, tmp_path, on_any_device):
    model = flexible(family)
    trainer = make_trainer(model, tmp_path, single_pass=False, gradient_checkpointing=checkpoints)
    if checkpoints:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    CALLS.clear()
    compare(trainer, tiny_model(family), *unequal_batch(4))
    features = int(max(trainer.args.feature_layers) * 4)
    assert len(CALLS) == features + 4 + 4 * checkpoints  # the layers that features need, and the policy's
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.first(3)
@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {"rollout_tokens_per_pass": 36}),
    *((family, {"single_pass": False, **changes}) for family in ("gemma2", "llama")
      for changes in ({"generate_max_len": 1}, {"temperature": 0.2}, {"merge_rollouts": False})),
], ids=str)  # fmt: skip
def test_parts_rollouts_of_one_token_and_with_common_beginnings(family, changes, tmp_path, on_any_device):
    exact(tmp_path, flexible(family), unequal_batch(4), **changes)
    assert CALLS


@pytest.mark.slow
def test_the_real_kernel_computes_what_the_dense_one_does(tmp_path, monkeypatch):
    """Values, on the masks and score functions of a whole step; PyTorch runs the kernel uncompiled here."""
    compared = []

    def both(*args, **kwargs):
        expected = dense_kernel(*args, **kwargs)
        got = flex.flex_attention(*(x.detach() for x in args), **kwargs)
        has_lse = kwargs["return_aux"] is not None
        for a, b in [(got[0], expected[0]), (got[1].lse, expected[1].lse)] if has_lse else [(got, expected)]:
            torch.testing.assert_close(a, b.detach(), atol=1e-5, rtol=1e-4)
            compared.append(1)
        return expected

    monkeypatch.setattr(flex, "available", lambda device: True)
    monkeypatch.setattr(flex, "_kernel", lambda compiled: both)
    for family in ("gemma2", "gpt_oss"):
        trainer = make_trainer(flexible(family), tmp_path, single_pass=False)
        compared.clear()
        trainer.compute_loss(trainer.model, unequal_batch()[0])
        assert len(compared) >= 6


@pytest.mark.parametrize("make", [contexts, later_turns])
def test_samples_with_shared_prompts(make, on_any_device):
    model, plain = flexible("llama").eval(), tiny_model("llama").eval()
    for prompt, completion in zip(make(), sample(model, make(), [4] * len(make()))):
        expected = oracle.token_logps(plain, prompt, completion.ids, 0.7).detach()
        torch.testing.assert_close(torch.tensor(completion.logps), expected.float(), atol=1e-4, rtol=0)
