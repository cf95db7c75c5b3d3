"""Passes over [documents | nodes]: every rollout token attends to its document prefix and to the tokens before it.

Rollouts of a block are a tree (a trie): a prefix that several rollouts share is one path, whose nodes, the tokens, are
computed once. A token's states, logits and features depend on the tokens before it alone, and the gradient of a shared
token is the sum of its rollouts' gradients. At a temperature below 1, many rollouts share a prefix.

S  document tokens of the batch   M  blocks   N  rollouts per block   R = M * N   T  tokens of a rollout in a pass
C  nodes of the pass (queries): distinct prefixes, ordered by length, then by block    U  own keys of a node
H  query heads    K  key/value heads     Q = H / K        D  head dimension
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ebft.prefix.attention import MaskPattern, PrefixPass, Visibility, document_attention
from ebft.prefix.attention.passes import rows_per_tile, sink_rows
from ebft.prefix.attention.states import Layer, States, along_documents, run_to_end
from ebft.prefix.attention.tiles import BatchedTiles, Own, Tile, attend, batch_tiles
from ebft.strided.layout import StridedLayout


@dataclass(frozen=True)
class Level:
    """The nodes (C,) of one length: last token, block, and the step, which is the position of tokens in their rollout.

    parent (C,): the node of the level before that each continues, None if all continue the node of the same number.
    node (R,): the node of each rollout. step is a tensor (1,) in a pass that is recorded once for several steps.
    """

    tokens: Tensor
    block: Tensor
    step: int | Tensor
    parent: Tensor | None
    node: Tensor


@dataclass(frozen=True)
class Draws:
    """Where each rollout (R,) draws its next token: from a `row` of logits, as its draw number `column`.

    Rollouts of the same node draw from one row. shape: the numbers of rows and of columns.
    """

    row: Tensor
    column: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, row: Tensor, num_rows: int, num_columns: int | None = None) -> Draws:
        """Number the rollouts of each row, given the row of each rollout (R,), and the most of a row if it is known."""
        order = row.argsort(stable=True)
        first = torch.searchsorted(row[order], torch.arange(num_rows, device=row.device))
        column = torch.empty_like(row)
        column[order] = torch.arange(len(row), device=row.device) - first[row[order]]
        return cls(row, column, (num_rows, int(column.max()) + 1 if num_columns is None else num_columns))

    def spread(self, values: Tensor) -> Tensor:
        """Arrange values (R,) of the rollouts by row and column; columns without a rollout repeat the first one."""
        first = values.new_empty(self.shape[0] + 1)  # the last takes what is not the first of a row
        first[self.row.masked_fill(self.column > 0, self.shape[0])] = values
        return first[:-1].unsqueeze(1).repeat(1, self.shape[1]).index_put_((self.row, self.column), values)

    def collect(self, values: Tensor) -> Tensor:
        """Return the values of the rollouts (R,), from values arranged by row and column."""
        return values.flatten().index_select(0, self.row * values.shape[1] + self.column)


@dataclass(frozen=True)
class RegularDraws:
    """The same where nodes are not merged: `many` rows with `columns` draws, followed by `single` rows with one."""

    many: int
    columns: int
    single: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.many + self.single, self.columns if self.many else 1

    def spread(self, values: Tensor) -> Tensor:
        of_many, of_single = values.split([self.many * self.columns, self.single])
        if not (self.many and self.single):
            return values.view(self.shape)
        return torch.cat([of_many.view(-1, self.columns), of_single.unsqueeze(1).expand(-1, self.columns)])

    def collect(self, values: Tensor) -> Tensor:
        if not (self.many and self.single):
            return values.flatten()
        return torch.cat([values[: self.many].flatten(), values[self.many :, 0]])


@dataclass(frozen=True)
class Nodes:
    """All nodes (C,) of the first T levels, with the fields of `Level`.

    path (C, T): the node of each token up to it; after the last one, the node itself. of_rollouts (M, N, T): the
    node of each rollout token. With `is_merged` False, each rollout has nodes of its own: C = T * R, and node t * R + r
    is token t of rollout r.
    """

    tokens: Tensor
    block: Tensor
    step: Tensor
    find_path: Callable[[], Tensor]
    of_rollouts: Tensor
    is_merged: bool

    @cached_property
    def path(self) -> Tensor:
        return self.find_path()

    @property
    def steps(self) -> int:
        """The number of levels, T."""
        return self.of_rollouts.shape[-1]

    @cached_property
    def first(self) -> Tensor:
        """The first of the rollout tokens (M * N * T) that each node is: (C,)."""
        of_tokens = self.of_rollouts.flatten()
        numbers = torch.arange(len(of_tokens), device=of_tokens.device)
        return torch.full_like(self.tokens, len(of_tokens)).scatter_reduce(0, of_tokens, numbers, "amin")

    @cached_property
    def by_block(self) -> Tensor:
        """The nodes ordered by block, and if they are not merged, by rollout: (C,)."""
        return self.block.argsort(stable=True) if self.is_merged else self.of_rollouts.flatten()

    @cached_property
    def rank(self) -> Tensor:
        """The place of each node in this order: (C,)."""
        rank = torch.empty_like(self.by_block)
        rank[self.by_block] = torch.arange(len(rank), device=rank.device)
        return rank


class RolloutTree:
    """The rollouts of M blocks, token by token. Without `merge`, equal prefixes are separate nodes."""

    def __init__(self, num_blocks: int, num_samples: int, merge: bool, device: torch.device):
        self.num_blocks, self.num_samples, self.merge = num_blocks, num_samples, merge
        self.levels: list[Level] = []
        self._block = torch.arange(num_blocks, device=device).repeat_interleave(num_samples)  # (R,)
        self._node = torch.arange(num_blocks * num_samples, device=device)  # of each rollout, if they are not merged

    @classmethod
    def of(cls, tokens: Tensor, merge: bool) -> RolloutTree:
        """Return the tree of rollouts (M, N, T)."""
        tree = cls(*tokens.shape[:2], merge, tokens.device)
        for of_step in tokens.unbind(-1):
            tree.grow(of_step.flatten())
        return tree

    def draws(self) -> Draws | RegularDraws:
        """Return the draws of the next tokens: from the blocks, or else from the nodes of the last level."""
        return self._draws(len(self.levels))

    def all_draws(self) -> Draws | RegularDraws:
        """Return the draws of all levels, (G * R,), from rows [blocks | nodes of all levels but the last]."""
        if not self.merge:
            return RegularDraws(self.num_blocks, self.num_samples, len(self._block) * (len(self.levels) - 1))
        draws = [self._draws(length) for length in range(len(self.levels))]
        rows = [each.shape[0] for each in draws]
        offsets = [sum(rows[:number]) for number in range(len(rows))]
        return Draws(
            torch.cat([each.row + offset for each, offset in zip(draws, offsets)]),
            torch.cat([each.column for each in draws]),
            (sum(rows), max(each.shape[1] for each in draws)),
        )

    def _draws(self, length: int) -> Draws | RegularDraws:
        """Return the draws of the tokens that follow the first `length`."""
        if not self.merge:
            return (
                RegularDraws(0, 1, len(self._block)) if length else RegularDraws(self.num_blocks, self.num_samples, 0)
            )
        if length == 0:
            return Draws.of(self._block, self.num_blocks, self.num_samples)
        level = self.levels[length - 1]
        return Draws.of(level.node, len(level.tokens))

    def grow(self, tokens: Tensor) -> Level:
        """Append a token to each rollout, (R,), and return the level of the new nodes."""
        last = self.levels[-1] if self.levels else None
        if self.merge:
            # Sorted by what they continue, and thus by block.
            before = self._block if last is None else last.node
            found, node = torch.unique(before << 32 | tokens, return_inverse=True)
            tokens, parent = found & 0xFFFFFFFF, found >> 32
            block = parent if last is None else last.block[parent]
        else:
            node, parent, block = self._node, None, self._block
        self.levels.append(Level(tokens, block, len(self.levels), None if last is None else parent, node))
        return self.levels[-1]

    def nodes(self, steps: int) -> Nodes:
        """Return the nodes of the first `steps` levels."""
        levels, none = self.levels[:steps], self._block[:0]
        tokens = torch.cat([none, *(level.tokens for level in levels)])
        if not self.merge:
            rollouts = len(self._block)
            numbers = torch.arange(steps * rollouts, device=none.device)
            return Nodes(
                tokens,
                self._block.repeat(steps),
                numbers // max(rollouts, 1),
                lambda: self._path(steps),
                numbers.view(steps, -1, self.num_samples).permute(1, 2, 0) if steps else none.view(0, 0, 0),
                is_merged=False,
            )
        steps_of_levels = [torch.full_like(level.tokens, step) for step, level in enumerate(levels)]
        offsets = [sum(len(level.tokens) for level in levels[:number]) for number in range(steps)]
        of_rollouts = [offset + level.node for offset, level in zip(offsets, levels)]
        return Nodes(
            tokens,
            torch.cat([none, *(level.block for level in levels)]),
            torch.cat([none, *steps_of_levels]),
            lambda: self._path(steps),
            torch.stack(of_rollouts, -1).view(-1, self.num_samples, steps) if steps else none.view(0, 0, 0),
            is_merged=True,
        )

    def _path(self, steps: int) -> Tensor:
        """Return `Nodes.path` of the first `steps` levels."""
        paths, offset = [], 0
        for step, level in enumerate(self.levels[:steps]):
            own = offset + torch.arange(len(level.tokens), device=level.tokens.device)
            path = own.unsqueeze(1).repeat(1, steps)
            if step:
                path[:, :step] = (paths[-1] if level.parent is None else paths[-1][level.parent])[:, :step]
            paths.append(path)
            offset += len(own)
        return torch.cat([self._block.new_empty(0, steps), *paths])


@dataclass(kw_only=True)
class StridedPass(PrefixPass):
    """One forward pass over a layout, of one of three kinds.

    Prefill, if `nodes` is None: documents only; their keys and values are stored in the cache.
    Decode, if it is a level: the last token of every rollout; its key and value are appended to the cache.
    Score, if it is all nodes of some levels: [documents | nodes] in a single pass, with gradients if enabled.
    """

    layout: StridedLayout
    document_positions: Tensor
    nodes: Level | Nodes | None = None
    kept: dict = field(default_factory=dict)  # what the decode passes of one cache have in common

    def position_ids(self) -> Tensor:
        if self.nodes is None:
            return self.document_positions[None]
        positions = self.layout.block_anchors[self.nodes.block] + self.nodes.step
        return (positions if isinstance(self.nodes, Level) else torch.cat([self.document_positions, positions]))[None]

    def tokens(self) -> Visibility | None:
        if not isinstance(self.nodes, Nodes):
            return None
        layout, nodes = self.layout, self.nodes
        return Visibility.of(
            layout.spans,
            self.position_ids()[0],
            document=layout.block_document[nodes.block],
            owner=torch.arange(len(nodes.tokens), device=layout.device),
            prefix=layout.block_anchors[nodes.block],
            step=nodes.step,
            path=nodes.path if len(nodes.tokens) else None,
        )

    def attend(self, call, query, key, value, pattern, scores, sinks) -> Tensor:
        spans, nodes = self.layout.spans, self.nodes
        if nodes is None:
            self.cache[call] = _with_room(self.layout, key, value)
            return document_attention(spans, query, key, value, pattern, scores, sinks)
        if isinstance(nodes, Level):
            document, own = _cached(self, call, key, value)
            return _node_attention(self, query, document, own, pattern, scores, sinks)
        s, c = len(self.document_positions), len(nodes.tokens)
        # Split rather than sliced: the gradient of slices is a sum of as many tensors, each padded with zeros.
        queries, keys, values = query.split([s, c], 2), key.split([s, c], 1), value.split([s, c], 1)
        document, own = (keys[0], values[0]), (keys[1], values[1])
        output = document_attention(spans, queries[0], *document, pattern, scores, sinks)
        if not c:  # rollouts of one token are scored from the document's states
            return output
        with_room = _with_room(self.layout, *document)
        return torch.cat([output, _node_attention(self, queries[1], with_room, own, pattern, scores, sinks)])

    def advance(self, call, layer: Layer, hidden: Tensor) -> Tensor:
        nodes = self.nodes
        if isinstance(nodes, Level):
            before = nodes.parent if nodes.step else nodes.block
            states: States = self.cache[call] if before is None else self.cache[call].rows(before)
            output = layer(hidden.transpose(0, 1), states)
            self.cache[call] = states
            return output.transpose(0, 1)
        s = len(self.document_positions)
        output, states = along_documents(layer, hidden[:, :s], self.layout.spans, self.layout.anchors)
        if nodes is None:
            self.cache[call] = states
            return output
        if not len(nodes.tokens):
            return output
        of_rollouts = nodes.of_rollouts.flatten(0, 1)  # (R, T)
        block = torch.arange(self.layout.num_blocks, device=hidden.device).repeat_interleave(self.layout.num_samples)
        of_tokens = run_to_end(layer, hidden[0, s:][of_rollouts], states.rows(block))
        # A node that several rollouts share is computed in the first one's row.
        return torch.cat([output, of_tokens.flatten(0, 1)[nodes.first][None]], 1)

    def rows(self, tokens: Tensor) -> Tensor:
        layout, nodes, s = self.layout, self.nodes, len(self.document_positions)
        anchors, before = layout.block_anchors, layout.block_index - layout.block_anchors  # where documents start
        if isinstance(nodes, Level):
            path = self.cache.get("paths", tokens[:0].view(len(layout.block_anchors), 0))
            parent = nodes.block if not nodes.step else nodes.parent
            path = torch.cat([path if parent is None else path[parent], tokens[:, None]], 1)
            self.cache["paths"] = path
            self.places = torch.arange(len(tokens), device=tokens.device), anchors[nodes.block] + nodes.step
            return _padded(self.cache["text"], before[nodes.block], anchors[nodes.block], path)
        text, spans = tokens[:s], torch.tensor(layout.spans, device=tokens.device)
        starts, lengths = spans[:, 0], spans[:, 1] - spans[:, 0]
        document = torch.arange(len(spans), device=tokens.device).repeat_interleave(lengths)
        self.places = document, self.document_positions
        if nodes is None or not len(nodes.tokens):
            self.cache["text"] = text
            return _padded(text, starts, lengths, text.view(s, 1)[: len(spans), :0])
        block = torch.arange(layout.num_blocks, device=tokens.device).repeat_interleave(layout.num_samples)
        path = nodes.tokens[nodes.of_rollouts.flatten(0, 1)]  # (R, T)
        row, step = nodes.first // nodes.steps, nodes.first % nodes.steps
        of_nodes = len(spans) + row, anchors[block][row] + step
        self.places = tuple(torch.cat(pair) for pair in zip(self.places, of_nodes))
        path = torch.cat([path.new_zeros(len(spans), nodes.steps), path])
        return _padded(text, torch.cat([starts, before[block]]), torch.cat([lengths, anchors[block]]), path)


def _padded(text: Tensor, starts: Tensor, lengths: Tensor, paths: Tensor) -> Tensor:
    """Rows (B, L) of parts of a text (S,), by start and length (B,), each followed by its path (B, T) and padding."""
    position = torch.arange(int(lengths.max()) + paths.shape[1], device=text.device)
    part = text[(starts[:, None] + position).clamp(max=len(text) - 1)]
    if not paths.shape[1]:
        return part
    beyond = position - lengths[:, None]
    return torch.where(beyond < 0, part, paths.gather(1, beyond.clamp(0, paths.shape[1] - 1)))


def _with_room(layout: StridedLayout, *shared: Tensor) -> tuple[Tensor, ...]:
    """Return keys and values (K, S, D) of the documents, followed by others as far as tiles need it, see `Tile`."""
    room = layout.tokens_beyond
    return tuple(nn.functional.pad(x, (0, 0, 0, room)) for x in shared) if room else shared


def _cached(run, call, key, value):
    """Append the newest tokens to the cache and return the cached keys and values. The keys and values of the
    documents, with room, are (K, S, D). Each node row of the others, (K, C, U, D), has its own key or value and the
    keys or values of the nodes that it continues."""
    document_key, document_value, *own = run.cache[call]
    newest, step = (key, value), run.nodes.step
    if run.layout.merge_rollouts:
        newest = [x.unsqueeze(2) for x in newest]
        before = [x.index_select(1, run.nodes.parent) for x in own]
        own = [torch.cat(pair, 2) for pair in zip(before, newest)] if own else newest
        run.cache[call] = (document_key, document_value, *own)
        return (document_key, document_value), own
    if not own:  # room for all steps; the last token of a rollout is never read
        steps = run.layout.generate_max_len - 1
        own = [x.new_zeros(*x.shape[:2], steps, x.shape[2]) for x in newest]
        run.cache[call] = (document_key, document_value, *own)
    if isinstance(step, Tensor):
        own = [cached.index_copy_(2, step, x.unsqueeze(2)) for cached, x in zip(own, newest)]
        return (document_key, document_value), own
    for cached, x in zip(own, newest):
        cached[:, :, step] = x
    return (document_key, document_value), [x[:, :, : step + 1] for x in own]


def _node_attention(run, query, document, own, pattern, scores, sinks) -> Tensor:
    """Compute attention (C, H, D) of nodes to their document prefix and to the nodes that they continue. query:
    (K, Q, C, D); document: key and value (K, S, D); own: key and value, of a level (K, C, U, D), else (K, C, D)."""
    (k, q, _, d), nodes = query.shape, run.nodes
    path, by_rollout = None, isinstance(nodes, Nodes) and not nodes.is_merged
    rows = query.transpose(1, 2)  # (K, C, Q, D)
    if by_rollout:  # (K, R, T, Q, D): the owner of keys is a rollout, and each of its tokens has Q rows
        rows = rows.unflatten(1, (nodes.steps, -1)).transpose(1, 2)
        own = tuple(x.unflatten(1, (nodes.steps, -1)).transpose(1, 2).contiguous() for x in own)  # (K, R, T, D)
    elif isinstance(nodes, Nodes):  # the nodes of a level are ordered by block
        rows, path = _Reordered.apply(rows, 1, nodes.by_block, nodes.rank), nodes.path[nodes.by_block]
    u = own[0].shape[2] if path is None else path.shape[1]
    tiles, hidden = _node_tiles(run, pattern, (q, k), u, batches=sinks is None)
    output = attend(
        rows.reshape(k, -1, d), *document, Own(*own, hidden, path), tiles, scores, sink_rows(sinks, k, q, 1)
    )
    output = output.unflatten(1, (-1, q))  # (K, C, Q, D)
    if by_rollout:
        output = output.unflatten(1, (-1, nodes.steps)).permute(2, 1, 0, 3, 4).flatten(0, 1)
    else:
        output = output.transpose(0, 1)  # (C, K, Q, D)
        if path is not None:
            output = _Reordered.apply(output, 0, nodes.rank, nodes.by_block)
    return output.flatten(1, 2)


class _Reordered(torch.autograd.Function):
    """`x.index_select(dim, order)` for a permutation, with its inverse: the gradient is a selection too."""

    @staticmethod
    def forward(ctx, x, dim, order, inverse):
        ctx.dim, ctx.inverse = dim, inverse
        return x.index_select(dim, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.index_select(ctx.dim, ctx.inverse), None, None, None


def _node_tiles(
    run: StridedPass, pattern: MaskPattern, heads: tuple[int, int], num_keys: int, batches: bool
) -> tuple[list[Tile | BatchedTiles], Tensor | None]:
    """Return the tiles of a pass's nodes, Q rows per node, and the mask of their own keys (C * Q, U); heads: Q and K.
    The mask is None if nothing is masked."""
    nodes, is_decode = run.nodes, isinstance(run.nodes, Level)

    def make_tiles() -> list[Tile | BatchedTiles]:
        return batch_tiles(list(_tiles(run, pattern, *heads)), heads[1] if batches else None)

    def make_hidden() -> Tensor | None:
        block, step = _by_block(run)
        if is_decode and pattern.is_causal and isinstance(step, int):
            return None  # the own keys of a level are tokens that it continues
        anchor, key_step = run.layout.block_anchors[block, None], torch.arange(num_keys, device=block.device)
        step = step[:, None] if isinstance(nodes, Nodes) else step
        hidden = (key_step > step).expand(len(block), -1)
        if not pattern.is_causal:
            hidden = hidden | ~pattern.allowed(anchor + step, anchor + key_step)
        return hidden.repeat_interleave(heads[0], 0)

    if is_decode and pattern.is_causal and nodes.parent is None and not run.layout.merge_rollouts:
        # The prefix that each rollout attends to is the same in all steps.
        tiles = run.kept[heads, batches] = run.kept.get((heads, batches)) or make_tiles()
    else:
        run.kept["moves"] = True
        tiles = pattern.keep(("tiles", heads, batches), make_tiles)
    return tiles, pattern.keep(("hidden", heads, num_keys), make_hidden)


def _by_block(run: StridedPass) -> tuple[Tensor, Tensor | int]:
    """Return block and step of the pass's nodes, ordered by block: (C,) each, or one step for all nodes of a level."""
    nodes = run.nodes
    if isinstance(nodes, Level):
        return nodes.block, nodes.step
    return nodes.block[nodes.by_block], nodes.step[nodes.by_block]


def _tiles(run: StridedPass, pattern: MaskPattern, heads: int, key_heads: int) -> Iterator[Tile]:
    """Return the tiles of a pass's nodes and their documents' keys, a few blocks at a time."""
    layout, nodes, (block, step) = run.layout, run.nodes, _by_block(run)
    anchor = layout.block_anchors[block]
    position = anchor + step
    if nodes.is_merged if isinstance(nodes, Nodes) else layout.merge_rollouts:
        counts = torch.bincount(block, minlength=layout.num_blocks).tolist()
    else:  # blocks have as many nodes as each other, which a GPU need not be asked for
        counts = [len(block) // layout.num_blocks] * layout.num_blocks
    longest = max(end - start for start, end in layout.spans)
    most = max(1, rows_per_tile(layout.device, key_heads, longest) // heads)
    first = number = 0
    for (start, _), anchors in zip(layout.spans, layout.anchors):
        while anchors:
            taken, stop = 1, first + counts[number]
            while taken < len(anchors) and stop - first + counts[number + taken] <= most:
                stop += counts[number + taken]
                taken += 1
            # The prefix ends at the block's anchor, whatever the query's position in the block.
            of_tile, limit = position[first:stop], anchor[first:stop]
            yield pattern.tile(of_tile, heads, first, (start, anchors[taken - 1]), anchors[0], limit)
            first, number, anchors = stop, number + taken, anchors[taken:]
