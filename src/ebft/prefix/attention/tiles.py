"""Exact softmax attention, computed tile by tile, with a backward pass that recomputes the attention weights.

A tile consists of adjacent queries and the range of shared keys that they attend to. Only the scores of one tile are
in memory at a time, and nothing of size queries x keys is stored, so memory is linear in the number of tokens.

    K  key/value heads    R  query rows (the concatenated queries that share a key head)    D  head dimension
    S  shared keys        E  owners: groups of R / E consecutive rows, each with U own keys
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ebft.prefix import gpu
from ebft.prefix.attention.batches import MOST_PADDING, DocumentBatch, grouped
from ebft.prefix.sampling import of_device, on_device


@dataclass(frozen=True)
class Tile:
    """Query rows `rows` and the shared keys `keys` that they attend to; `hidden` (rows, W) masks the last W keys.

    If rows have own keys, at least as many shared keys must follow `keys` (for a rollout, its reference's keys).
    """

    rows: slice
    keys: slice
    hidden: Tensor

    @property
    def height(self) -> int:
        """Number of query rows."""
        return self.rows.stop - self.rows.start

    @property
    def width(self) -> int:
        """Number of shared keys."""
        return self.keys.stop - self.keys.start

    def take_rows(self, x: Tensor) -> Tensor:
        """Return the tile's rows of x (K, R, X)."""
        return x[:, self.rows]

    def in_order(self, rows: Tensor) -> Tensor:
        """Return rows in the order of (K, R, X), which for a tile is unchanged."""
        return rows

    def take_keys(self, x: Tensor, after: int = 0) -> Tensor:
        """Return the tile's shared keys of x (K, S, X) and the `after` keys that follow them."""
        return x[:, self.keys.start : self.keys.stop + after]

    def put(self, output: Tensor, weights: Tensor, keys: Tensor, scaling: float) -> None:
        """Write the products of weights (K, rows, keys) and the tile's part of keys (K, S, X) to its output rows."""
        _scaled(weights, self.take_keys(keys), scaling, out=self.take_rows(output))

    def add_to_keys(self, total: Tensor, weights: Tensor, rows: Tensor, scaling: float) -> None:
        """Add the products of the transposed weights (K, rows, keys) and the tile's rows to total (K, S, X)."""
        total, weights, rows = total[:, self.keys], weights.mT, self.take_rows(rows)
        if rows.dtype == total.dtype:
            total.baddbmm_(weights, rows, alpha=scaling)
        else:
            total.add_(weights @ rows, alpha=scaling)

    def hide(self, shared: Tensor) -> None:
        """Set the scores (K, rows, keys) of masked keys to minus infinity, in place."""
        shared[..., self.width - self.hidden.shape[-1] :].masked_fill_(self.hidden, float("-inf"))

    def hide_own(self, own: Tensor, hidden: Tensor) -> None:
        """Set the scores (K, rows, U) of own keys masked by `hidden` (R, U) to minus infinity, in place."""
        own.masked_fill_(hidden[self.rows], float("-inf"))


@dataclass(frozen=True)
class Own:
    """The owners' own keys and values (K, E, U, D), and the mask `hidden` (R, U), True for masked keys.

    `hidden` is None if no own key is masked.
    With `path` (E, U), owners share keys: the keys and values are (K, C, D), and owner e has the ones at path[e].
    """

    key: Tensor
    value: Tensor
    hidden: Tensor | None
    path: Tensor | None = None


@dataclass(frozen=True)
class AttentionScores:
    """How scores are computed from query-key products, and the dropout rate of the attention weights."""

    scaling: float
    softcap: float | None = None
    dropout: float = 0.0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Own | None,
    tiles: list[Tile],
    scores: AttentionScores,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of query (K, R, D) to key and value (K, S, D) and to the rows' own keys: (K, R, D).

    `tiles` cover the rows in order; without sinks, they may be `BatchedTiles`. A single softmax, in float32,
    covers a row's shared and own keys. `sinks` (K, P), repeated along the rows, are logits without a value that are
    included in the softmax.
    """
    last_key = max((tile.keys.stop for tile in tiles if isinstance(tile, Tile)), default=0)
    own_keys = 0 if own is None else (own.key if own.path is None else own.path[..., None]).shape[-2]
    assert own is None or last_key + own_keys <= key.shape[1], "too few shared keys follow a tile"
    seed = int(torch.randint(2**31, ())) if scores.dropout else 0
    own_tensors = (None,) * 4 if own is None else (own.key.to(value.dtype), own.value, own.hidden, own.path)
    # With autocast, queries and keys are float32 after the rotary embedding; cast once instead of for every product.
    query, key = query.to(value.dtype), key.to(value.dtype)
    with torch.autocast(query.device.type, enabled=False):
        return _Attention.apply(query, key, value, *own_tensors, sinks, tiles, scores, seed)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, own_key, own_value, own_hidden, path, sinks, tiles, scores, seed):
        weigh = _Weights(query, key, _taken(own_key, path), own_hidden, sinks, tiles, scores, seed)
        products = Products(weigh, value, _taken(own_value, path))
        for tile in tiles:
            weights, _ = weigh(tile)
            products.add(weigh.dropped(weights, tile).to(value.dtype), tile)
        ctx.save_for_backward(query, key, value, own_key, own_value, own_hidden, path, sinks)
        ctx.rest = (tiles, scores, seed)
        return products.total()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, common_key, common_value, own_hidden, path, sinks = ctx.saved_tensors
        tiles, scores, seed = ctx.rest
        own_key, own_value = _taken(common_key, path), _taken(common_value, path)
        weigh = _Weights(query, key, own_key, own_hidden, sinks, tiles, scores, seed)
        grad = grad.contiguous()
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=weigh.dtype)
        grad_own = weigh.of_own(grad, own_value)
        to_query = Products(weigh, key, own_key, scores.scaling)
        to_key = Transposed(weigh, query, key, own_key is not None, scores.scaling)
        to_value = Transposed(weigh, grad, value, own_key is not None)
        for tile in tiles:
            weights, slope = weigh(tile)
            grad_weights = weigh.products(grad, value, grad_own, 1.0, tile).to(weigh.dtype)
            if sinks is not None:
                grad_weights = F.pad(grad_weights, (0, 1))  # a sink has no value
            grad_weights = weigh.dropped(grad_weights, tile)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weigh.dtype)
            if sinks is not None:
                grad_sinks += grad_scores[..., -1].unflatten(1, (-1, sinks.shape[1])).sum(1)
            if slope is not None:
                grad_scores *= slope
            grad_scores, weights = grad_scores.to(query.dtype), weigh.dropped(weights, tile).to(value.dtype)
            to_query.add(grad_scores, tile)
            to_key.add(grad_scores, tile)
            to_value.add(weights, tile)
        grads = (
            to_query.total(),
            to_key.total(),
            to_value.total(),
            _put_back(to_key.total_of_own(), common_key, path),
            _put_back(to_value.total_of_own(), common_value, path),
        )
        return *grads, None, None, None if sinks is None else grad_sinks.to(sinks.dtype), None, None, None


class Products:
    """Products of the weights (K, rows, columns) of all tiles with the shared and own keys, times `scaling`."""

    def __init__(self, weigh: _Weights, keys: Tensor, own_keys: Tensor | None, scaling: float = 1.0):
        self.weigh, self.keys, self.own_keys, self.scaling = weigh, keys, own_keys, scaling
        self._own: list[Tensor] = []  # weights of each tile
        self._total = keys.new_empty(*weigh.query.shape[:2], keys.shape[-1])

    def add(self, weights: Tensor, tile: Tile | BatchedTiles) -> None:
        """Multiply the weights of a tile."""
        shared, own = self.weigh.columns(weights, tile)
        tile.put(self._total, shared, self.keys, self.scaling)
        self._own.append(tile.in_order(own))

    def total(self) -> Tensor:
        """Return the sums over shared and own keys, of all rows: (K, R, X)."""
        if self.own_keys is not None:
            total, own = (self.weigh.by_owner(x).flatten(0, 1) for x in (self._total, _joined(self._own)))
            total.baddbmm_(own, self.own_keys.flatten(0, 1), alpha=self.scaling)
        return self._total


class Transposed:
    """Products of the transposed weights of all tiles with `rows` (K, R, X), summed for each of `keys` (K, S, X).

    Sums over many tiles are accumulated in float32.
    """

    def __init__(self, weigh: _Weights, rows: Tensor, keys: Tensor, has_own: bool, scaling: float = 1.0):
        self.weigh, self.rows, self.has_own, self.scaling = weigh, rows, has_own, scaling
        self._dtype, self._own = keys.dtype, []
        self._total = torch.zeros_like(keys, dtype=weigh.dtype)

    def add(self, weights: Tensor, tile: Tile | BatchedTiles) -> None:
        """Multiply the weights of a tile."""
        shared, own = self.weigh.columns(weights, tile)
        tile.add_to_keys(self._total, shared, self.rows, self.scaling)
        if self.has_own:
            self._own.append(tile.in_order(own))

    def total(self) -> Tensor:
        """Return the sums for the shared keys: (K, S, X)."""
        return self._total.to(self._dtype)

    def total_of_own(self) -> Tensor | None:
        """Return the sums for the own keys, (K, E, U, X), if there are any."""
        if not self.has_own:
            return None
        own, rows = (self.weigh.by_owner(x) for x in (_joined(self._own), self.rows))
        return _scaled(own.flatten(0, 1).mT, rows.flatten(0, 1), self.scaling).unflatten(0, rows.shape[:2])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _scaled(left: Tensor, right: Tensor, scaling: float, out: Tensor | None = None) -> Tensor:
    """Return the products of two batches of matrices, times `scaling`, by one kernel."""
    out = left.new_empty(len(left), left.shape[1], right.shape[2]) if out is None else out
    return torch.baddbmm(out, left, right, beta=0, alpha=scaling, out=out)


def _taken(common: Tensor | None, path: Tensor | None) -> Tensor | None:
    """Return the own keys or values (K, E, U, D) of all owners, from those that owners have in common (K, C, D)."""
    if common is None or path is None:
        return common
    return common.index_select(1, path.flatten()).unflatten(1, path.shape)


def _put_back(grad: Tensor | None, common: Tensor | None, path: Tensor | None) -> Tensor | None:
    """Return the gradient of `common` from the gradient of `_taken`, in float32 until all owners are added."""
    if grad is None or common is None or path is None:
        return grad
    rows = grad.flatten(1, 2).transpose(0, 1).flatten(1)  # (E * U, K * D), since adding whole rows is faster
    total = rows.new_zeros(common.shape[1], rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    total.index_add_(0, path.flatten(), rows.to(total.dtype))
    return total.unflatten(1, (common.shape[0], -1)).transpose(0, 1).to(common.dtype)


class _Weights:
    """Computes the softmax weights of a tile, with columns [shared keys | own keys | sink]. `is_direct`: whether
    products with own keys are written into the columns of the only tile, a kernel less. Otherwise they are computed for
    all tiles at once, and copied."""

    def __init__(self, query, key, own_key, own_hidden, sinks, tiles, scores: AttentionScores, seed: int):
        self.query, self.key, self.own_hidden, self.sinks = query, key, own_hidden, sinks
        self.scores, self.seed = scores, seed
        self.dtype = torch.promote_types(query.dtype, torch.float32)  # dtype of the softmax and of sums over tiles
        self.is_direct = gpu.is_accelerator(query.device) and [type(tile) for tile in tiles] == [Tile]
        self.owners, self.own_width = (0, 0) if own_key is None else own_key.shape[1:3]
        self.own = self.of_own(query, own_key, scores.scaling)

    def of_own(self, rows: Tensor, own_keys: Tensor | None, scaling: float = 1.0) -> Tensor | None:
        """Return what `products` needs of the own keys: their products with the rows, (K, R, U), or the keys."""
        if own_keys is None or self.is_direct:
            return own_keys
        products = _scaled(self.by_owner(rows).flatten(0, 1), own_keys.flatten(0, 1).mT, scaling)
        return products.view(len(rows), -1, self.own_width)

    def __call__(self, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Return the weights (K, rows, columns) and, with a softcap, its derivative at every score."""
        scores, slope = self.products(self.query, self.key, self.own, self.scores.scaling, tile), None
        if self.scores.softcap is not None:
            capped = torch.tanh(scores.to(self.dtype) / self.scores.softcap)
            scores, slope = capped * self.scores.softcap, 1 - capped.square()
        shared, own = self.columns(scores, tile)
        tile.hide(shared)
        if self.own_hidden is not None:
            tile.hide_own(own, self.own_hidden)
        if self.sinks is not None:
            sinks = self.sinks.repeat(1, scores.shape[1] // self.sinks.shape[1]).unsqueeze(-1)
            scores = torch.cat([scores.to(self.dtype), sinks.to(self.dtype)], -1)
            slope = None if slope is None else F.pad(slope, (0, 1), value=1.0)
        if self.is_direct:
            return scores.softmax(-1, dtype=self.dtype), slope
        # Cast first: on CPU, a softmax that casts its input is slower.
        return scores.to(self.dtype).softmax(-1), slope

    def products(self, left: Tensor, right: Tensor, own: Tensor | None, scaling: float, tile: Tile) -> Tensor:
        """Return the scaled products of a tile's rows of `left` with the shared keys of `right` and with own keys.

        `own` is the result of `of_own`. The columns of the own keys are first filled with products of the keys that
        follow the shared keys and then overwritten, because a product that writes a complete matrix is faster than one
        that writes a part of it.
        """
        rows, columns = tile.take_rows(left), tile.take_keys(right, self.own_width).mT
        products = _scaled(rows, columns, scaling)
        if own is None:
            return products
        target = products[..., -self.own_width :]
        if self.is_direct:
            out = self.by_owner(target).flatten(0, 1)
            _scaled(self.by_owner(rows).flatten(0, 1), own.flatten(0, 1).mT, scaling, out=out)
        else:
            target.copy_(tile.take_rows(own))
        return products

    def columns(self, values: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return views of the columns of the shared keys and of the own keys."""
        return values[..., : tile.width], values[..., tile.width : tile.width + self.own_width]

    def by_owner(self, rows: Tensor) -> Tensor:
        """Reshape (K, R, X) to (K, E, R / E, X)."""
        return rows.unflatten(1, (self.owners, -1))

    def dropped(self, weights: Tensor, tile: Tile) -> Tensor:
        """Return the weights after dropout, with the same mask in every call, as forward and backward must agree."""
        rate = self.scores.dropout
        if not rate:
            return weights
        generator = torch.Generator(weights.device).manual_seed(self.seed + tile.rows.start)
        kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= rate
        return weights * kept / (1 - rate)


# Maximum number of scores of batched tiles: on CPU they fit in the cache, and elsewhere take 256 MiB in float32.
MOST_SCORES = {"cpu": 2**18, "other": 2**26}


@dataclass(frozen=True)
class BatchedTiles:
    """Adjacent tiles, padded to the longest. Has the interface of `Tile`, with K * D in place of K.

    Padding rows are other rows, which attend to all shared keys; nothing is made of their results. All other rows mask
    padding keys.
    """

    batch: DocumentBatch  # of the rows
    key_start: Tensor  # (D,)
    hidden: Tensor  # (D, R, W)
    _kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tiles: list[Tile]) -> BatchedTiles:
        device = tiles[0].hidden.device
        batch = DocumentBatch([(tile.rows.start, tile.rows.stop) for tile in tiles], device)
        hidden = torch.zeros(
            len(tiles), batch.longest, max(tile.width for tile in tiles), dtype=torch.bool, device=device
        )
        for of_tile, tile in zip(hidden, tiles):
            of_tile[: tile.height, tile.width - tile.hidden.shape[1] : tile.width] = tile.hidden
            of_tile[: tile.height, tile.width :] = True
        return cls(batch, on_device([tile.keys.start for tile in tiles], device), hidden)

    @property
    def rows(self) -> slice:
        return self.batch.tokens

    @property
    def width(self) -> int:
        return self.hidden.shape[2]

    def take_rows(self, x: Tensor) -> Tensor:
        """Return the rows (K * D, R, X) of x (K, rows, X)."""
        return self.batch.of(x).flatten(0, 1)

    def in_order(self, batched: Tensor) -> Tensor:
        """Convert batched rows (K * D, R, X) to consecutive rows (K, rows, X), without padding."""
        return self.batch.in_order(batched.unflatten(0, (-1, len(self.hidden))), 1)

    def take_keys(self, x: Tensor, after: int = 0) -> Tensor:
        """Return the shared keys of x (K, keys, X) and the `after` keys that follow them: (K * D, W + after, X)."""
        index = self._key_index(after, x.shape[1])
        return x.index_select(1, index).view(len(x) * len(self.hidden), -1, x.shape[2])

    def _key_index(self, after: int, num_keys: int) -> Tensor:
        """Return the indices of the tiles' keys and the `after` next ones among all: (D * (W + after),)."""
        if (after, num_keys) not in self._kept:
            index = self.key_start[:, None] + torch.arange(self.width + after, device=self.key_start.device)
            self._kept[after, num_keys] = index.clamp_max(num_keys - 1).flatten()
        return self._kept[after, num_keys]

    def put(self, output: Tensor, weights: Tensor, keys: Tensor, scaling: float) -> None:
        """Write the products of weights (K * D, R, W) and the tiles' part of keys (K, keys, X) to their rows."""
        output[:, self.rows] = self.in_order(_scaled(weights, self.take_keys(keys), scaling))

    def add_to_keys(self, total: Tensor, weights: Tensor, rows: Tensor, scaling: float) -> None:
        """Add the products of the transposed weights (K * D, R, W) and the tiles' rows to their part of total."""
        rows = self.batch.of(rows)
        if self.batch.is_padded:
            rows = rows.masked_fill(self.batch.padding.unsqueeze(-1), 0)
        added = (weights.mT @ rows.flatten(0, 1)).unflatten(0, (-1, len(self.hidden))).flatten(1, 2)
        total.index_add_(1, self._key_index(0, total.shape[1]), added.to(total.dtype), alpha=scaling)

    def hide(self, shared: Tensor) -> None:
        """Set the scores (K * D, R, W) of masked keys to minus infinity, in place."""
        shared.unflatten(0, (-1, len(self.hidden))).masked_fill_(self.hidden, float("-inf"))

    def hide_own(self, own: Tensor, hidden: Tensor) -> None:
        """Set the scores (K * D, R, U) of own keys masked by `hidden` (rows, U) to minus infinity, in place."""
        own.unflatten(0, (-1, len(self.hidden))).masked_fill_(self.batch.of(hidden[None])[0], float("-inf"))


def batch_tiles(tiles: list[Tile], key_heads: int | None) -> list[Tile | BatchedTiles]:
    """Combine adjacent tiles into batches that are small and contain little padding, keeping the order.

    With `key_heads` None, the tiles are returned unchanged.
    """
    if key_heads is None:
        return tiles

    def fit(group: list[Tile]) -> bool:
        padded = len(group) * max(tile.height for tile in group) * max(tile.width for tile in group)
        is_small = key_heads * padded <= of_device(MOST_SCORES, group[0].hidden.device)
        return is_small and padded <= MOST_PADDING["other"] * sum(tile.height * tile.width for tile in group)

    return [BatchedTiles.of(group) if len(group) > 1 else group[0] for group in grouped(tiles, fit)]
