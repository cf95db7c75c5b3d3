"""The step-major layout against a mask filled in by loops."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from ebft.strided import (
    build_strided_dense_mask_and_positions,
    build_strided_position_ids,
    create_strided_block_mask,
    override_attn_implementation,
)
from tests.strided.families import tiny_model


def naive(length, s, c, steps, stride, nb):
    visible = torch.zeros(length, length, dtype=torch.bool)
    position = torch.zeros(length, dtype=torch.long)
    for q in range(s):
        position[q] = q
        visible[q, : q + 1] = True
    for t in range(steps):
        for b in range(nb):
            q = s + t * nb + b
            position[q] = c + b * stride + t
            visible[q, : c + b * stride] = True
            for earlier in range(t + 1):
                visible[q, s + earlier * nb + b] = True
    return visible, position


@pytest.mark.parametrize(("steps", "extra"), [(0, 0), (1, 0), (3, 0), (2, 4)])
def test_dense_mask_and_positions(steps, extra):
    s, c, stride, nb, g = 20, 3, 4, 4, 3
    length = s + steps * nb + extra
    visible, position = naive(length, s, c, steps, stride, nb)
    mask, position_ids = build_strided_dense_mask_and_positions(
        length, s, c, steps, g, stride, nb, "cpu", batch_size=2, dtype=torch.float32
    )
    assert mask.shape == (2, 1, length, length) and mask.dtype == torch.float32
    assert mask.eq(0).equal(visible.expand(2, 1, -1, -1))
    assert mask[~mask.eq(0)].eq(torch.finfo(torch.float32).min).all()
    assert position_ids.tolist() == [position.tolist()] * 2
    assert build_strided_position_ids(length, s, c, steps, stride, nb, "cpu").tolist() == [position.tolist()]


def test_block_mask_is_the_same_pattern():
    s, c, stride, nb, g = 20, 3, 4, 4, 3
    length = s + g * nb
    visible, _ = naive(length, s, c, g, stride, nb)
    block_mask = create_strided_block_mask(s, c, g, stride, nb, length, 2, 4, "cpu")
    assert block_mask.shape == (2, 1, length, length)
    assert create_mask(block_mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0].equal(visible)


def test_dense_mask_scores_like_short_sequences():
    """A plain eager model under this mask gives each rollout the logits of its own short sequence."""
    model = tiny_model("llama").eval()
    s, c, stride, nb, g = 20, 3, 4, 4, 3
    generator = torch.Generator().manual_seed(0)
    document, rollout = (torch.randint(3, 97, shape, generator=generator) for shape in ((s,), (g, nb)))
    mask, position_ids = build_strided_dense_mask_and_positions(
        s + g * nb, s, c, g, g, stride, nb, "cpu", dtype=torch.float32
    )
    ids = torch.cat([document, rollout.flatten()])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position_ids).logits[0]
        for b in range(nb):
            anchor = c + b * stride
            plain = model(input_ids=torch.cat([document[:anchor], rollout[:, b]])[None]).logits[0]
            for t in range(g):
                torch.testing.assert_close(logits[s + t * nb + b], plain[anchor + t], atol=1e-4, rtol=1e-4)


def test_too_short_a_length_is_refused():
    with pytest.raises(ValueError, match="requires at least 28"):
        build_strided_position_ids(27, 20, 3, 2, 4, 4, "cpu")


def test_override_comes_back_whatever_happens():
    model = tiny_model("llama")
    with pytest.raises(RuntimeError), override_attn_implementation(model, "sdpa"):
        assert model.config._attn_implementation == "sdpa"
        raise RuntimeError
    assert model.config._attn_implementation == "eager"
