"""The step-major layout against a mask filled in by loops."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from ebft import strided
from tests.strided.families import tiny_model

S, C, STRIDE, NB, G = 20, 3, 4, 4, 3


def naive(length, steps):
    visible = torch.zeros(length, length, dtype=torch.bool)
    position = torch.zeros(length, dtype=torch.long)
    for q in range(S):
        position[q] = q
        visible[q, : q + 1] = True
    for t in range(steps):
        for b in range(NB):
            q = S + t * NB + b
            position[q] = C + b * STRIDE + t
            visible[q, : C + b * STRIDE] = True
            for earlier in range(t + 1):
                visible[q, S + earlier * NB + b] = True
    return visible, position


@pytest.mark.parametrize(("steps", "extra"), [(0, 0), (1, 0), (3, 0), (2, 4)])
def test_dense_mask_and_positions(steps, extra):
    length = S + steps * NB + extra
    visible, position = naive(length, steps)
    mask, position_ids = strided.build_strided_dense_mask_and_positions(
        length, S, C, steps, G, STRIDE, NB, "cpu", batch_size=2, dtype=torch.float32
    )
    assert mask.shape == (2, 1, length, length) and mask.dtype == torch.float32
    assert mask.eq(0).equal(visible.expand(2, 1, -1, -1))
    assert mask[~mask.eq(0)].eq(torch.finfo(torch.float32).min).all()
    assert position_ids.tolist() == [position.tolist()] * 2
    assert strided.build_strided_position_ids(length, S, C, steps, STRIDE, NB, "cpu").tolist() == [position.tolist()]
    with pytest.raises(ValueError, match="requires at least 28"):
        strided.build_strided_position_ids(27, S, C, 2, STRIDE, NB, "cpu")


def test_block_mask_is_the_same_pattern():
    length = S + G * NB
    block_mask = strided.create_strided_block_mask(S, C, G, STRIDE, NB, length, 2, 4, "cpu")
    assert block_mask.shape == (2, 1, length, length)
    assert create_mask(block_mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0].equal(naive(length, G)[0])


def test_the_attention_of_a_model_comes_back_after_an_error():
    model = tiny_model("llama")
    with pytest.raises(RuntimeError), strided.override_attn_implementation(model, "sdpa"):
        assert model.config._attn_implementation == "sdpa"
        raise RuntimeError
    assert model.config._attn_implementation == "eager"
