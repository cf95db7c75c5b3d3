"""Stacked tiles give what the tiles give apart, values and gradients, padding and all."""

import pytest
import torch

from ebft.prefix.attention import tiles
from ebft.prefix.attention.tiles import BatchedTiles, Scores, Tile, batch_tiles
from tests.prefix.test_tiles import PIECES, close, in_tiles, make_inputs


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_and_gradients(softcap, dtype, monkeypatch):
    """Rows of unequal number and keys of unequal width; what lies after the last key is not there."""
    monkeypatch.setattr(tiles, "_MOST_PADDING", 100)
    (stack,) = batch_tiles(PIECES, 2)
    assert isinstance(stack, BatchedTiles) and stack.is_padding is not None
    inputs, scores = [x.detach().to(dtype).requires_grad_() for x in make_inputs(False)], Scores(0.7, softcap)
    close(in_tiles(scores, *inputs, tiles=[stack]), in_tiles(scores, *inputs), inputs)


def tile(first_row, rows, width):
    return Tile(slice(first_row, first_row + rows), slice(0, width), torch.zeros(rows, 0, dtype=torch.bool))


def test_what_is_stacked(monkeypatch):
    """Neighbours of about one size, as long as their scores stay few; sinks leave all of them apart."""
    parts = [tile(0, 10, 20), tile(10, 10, 22), tile(20, 10, 200), tile(30, 9, 200)]
    kinds = [(type(part).__name__, part.rows.start, part.rows.stop) for part in batch_tiles(parts, 2)]
    assert kinds == [("BatchedTiles", 0, 20), ("BatchedTiles", 20, 39)]
    assert batch_tiles(parts, None) == parts
    parts = [tile(0, 10, 20), tile(10, 10, 20), tile(20, 10, 20)]
    monkeypatch.setattr(tiles, "_SCORES", 2 * 2 * 10 * 20)
    assert [part.rows for part in batch_tiles(parts, 2)] == [slice(0, 20), slice(20, 30)]
    assert [part.rows for part in batch_tiles(parts, 5)] == [p.rows for p in parts]
