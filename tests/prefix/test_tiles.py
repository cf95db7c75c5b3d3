"""Attention in tiles against one dense softmax, values and gradients, in float64."""

import pytest
import torch

from ebft.prefix.attention import MaskPattern
from ebft.prefix.attention import tiles as tiling
from ebft.prefix.attention.tiles import AttentionScores, BatchedTiles, Own, Tile, attend, batch_tiles

HEADS, ROWS, KEYS, OWNERS, WIDTH, DIM = 2, 12, 13, 3, 4, 5
# Rows in two tiles: the first sees keys 1..6 but for some of the last three, the second keys 4..9.
GENERATOR = torch.Generator().manual_seed(0)
PIECES = [
    Tile(slice(0, 8), slice(1, 6), torch.rand(8, 3, generator=GENERATOR) < 0.4),
    Tile(slice(8, 12), slice(4, 9), torch.zeros(4, 0, dtype=torch.bool)),
]
OWN_HIDDEN = torch.ones(4, 4, dtype=torch.bool).triu(1).repeat(OWNERS, 1)


def make_inputs(sinks):
    shapes = [(HEADS, ROWS, DIM), (HEADS, KEYS, DIM), (HEADS, KEYS, DIM)]
    shapes += [(HEADS, OWNERS, WIDTH, DIM)] * 2 + [(HEADS, 4)] * sinks
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def in_tiles(scores, query, key, value, own_key, own_value, sinks=None, tiles=PIECES):
    return attend(query, key, value, Own(own_key, own_value, OWN_HIDDEN), tiles, scores, sinks)


def dense(scores, query, key, value, own_key, own_value, sinks=None):
    """Every row against every key, shared and owned by anyone, under one mask."""
    seen = torch.zeros(ROWS, KEYS + OWNERS * WIDTH, dtype=torch.bool)
    for row in range(ROWS):
        tile = PIECES[0] if row < 8 else PIECES[1]
        seen[row, tile.keys] = True
        width = tile.hidden.shape[1]
        seen[row, tile.keys.stop - width : tile.keys.stop] &= ~tile.hidden[row - tile.rows.start]
        owner = row // 4
        for u in range(row % 4 + 1):
            seen[row, KEYS + owner * WIDTH + u] = True
    keys = torch.cat([key, own_key.flatten(1, 2)], 1)
    values = torch.cat([value, own_value.flatten(1, 2)], 1)
    products = query @ keys.mT * scores.scaling
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        products = torch.cat([products, sinks.repeat(1, ROWS // 4).unsqueeze(-1)], -1)
    return products.softmax(-1)[..., : keys.shape[1]] @ values


def close(ours, expected, inputs):
    torch.testing.assert_close(ours, expected)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2)).to(ours.dtype)
    for a, b in zip(*(torch.autograd.grad((output * weight).sum(), inputs) for output in (ours, expected))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values_and_gradients(softcap, sinks):
    scores, inputs = AttentionScores(0.7, softcap), make_inputs(sinks)
    close(in_tiles(scores, *inputs), dense(scores, *inputs), inputs)
    assert torch.autograd.gradcheck(lambda *x: in_tiles(scores, *x), inputs, fast_mode=True)
    if not sinks:
        assert torch.autograd.gradcheck(lambda *x: attend(*x, None, PIECES, scores), inputs[:3], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_own_keys_that_owners_have_in_common(dtype):
    path = torch.tensor([[0, 1, 2, 2], [0, 1, 3, 4], [4, 1, 0, 0]])
    query, key, value, *_ = (x.detach().to(dtype).requires_grad_() for x in make_inputs(False))
    common = torch.randn(2, HEADS, 5, DIM, generator=torch.Generator().manual_seed(4)).to(dtype)
    results = []
    for copied in (False, True):
        inputs = [x.detach().clone().requires_grad_() for x in (query, key, value, *common)]
        own = Own(*((x[:, path] for x in inputs[3:]) if copied else inputs[3:]), OWN_HIDDEN, None if copied else path)
        output = attend(*inputs[:3], own, PIECES, AttentionScores(0.7))
        output.square().sum().backward()
        results.append([output.detach(), *(x.grad for x in inputs)])
    for ours, expected in zip(*results):
        # In bfloat16, copying adds up the owners' gradients in bfloat16.
        tolerance = {"atol": 0.1, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": None, "rtol": None}
        torch.testing.assert_close(ours, expected, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [False, True])
def test_dropout_is_the_same_in_both_directions(sinks):
    """Finite differences agree with backward only where both drop the same weights."""
    scores, inputs = AttentionScores(0.7, dropout=0.3), make_inputs(sinks)

    def seeded(*x):
        torch.manual_seed(0)
        return in_tiles(scores, *x)

    assert torch.autograd.gradcheck(seeded, inputs)
    assert not torch.allclose(seeded(*inputs), in_tiles(AttentionScores(0.7), *inputs))
    torch.manual_seed(1)
    many = torch.stack([in_tiles(scores, *inputs).detach() for _ in range(4000)]).mean(0)
    torch.testing.assert_close(many, in_tiles(AttentionScores(0.7), *inputs).detach(), atol=0.06, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_over_pieces_in_float32(dtype):
    """Gradients of shared keys within rounding of float64, though many tiles add to them."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, r, 8, generator=generator).to(dtype) for r in (512, 16, 16))
    tiles = [Tile(slice(r, r + 2), slice(0, 16), torch.zeros(2, 0, dtype=torch.bool)) for r in range(0, 512, 2)]
    half = [x.clone().requires_grad_() for x in (query, key, value)]
    full = [x.double().requires_grad_() for x in (query, key, value)]
    for inputs in (half, full):
        attend(*inputs, None, tiles, AttentionScores(0.35)).sum().backward()
    for a, b in zip(half, full):
        assert (a.grad.double() - b.grad).norm() <= 0.02 * b.grad.norm() + 1e-3


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_batched_tiles_give_what_the_tiles_give_apart(softcap, dtype, monkeypatch):
    """Rows of unequal number and keys of unequal width; what lies after the last key is not there."""
    monkeypatch.setitem(tiling.MOST_PADDING, "other", 100)
    (stack,) = batch_tiles(PIECES, 2)
    assert isinstance(stack, BatchedTiles) and stack.batch.is_padded
    inputs, scores = [x.detach().to(dtype).requires_grad_() for x in make_inputs(False)], AttentionScores(0.7, softcap)
    close(in_tiles(scores, *inputs, tiles=[stack]), in_tiles(scores, *inputs), inputs)


def test_a_mask_is_sliced_as_a_whole_only():
    """Gemma 4 of transformers 5.24 takes the rows of the last `logits_to_keep` queries, which are all of them here."""
    pattern = MaskPattern(lambda *positions: True)
    assert pattern[:, :, slice(-0, None), :] is pattern
    with pytest.raises(NotImplementedError, match="a part of the attention mask"):
        pattern[:, :, slice(-1, None), :]
