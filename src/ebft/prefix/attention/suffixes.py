"""Attention over [prompts | suffixes]: each prompt is followed by suffixes of different lengths, without padding.

S  prompt tokens     X  suffix tokens     P  tokens of the longest prompt     L  tokens of the longest suffix
G  prompts           M  suffixes of each prompt           N = G * M suffixes
H  query heads       K  key/value heads    Q = H / K      D  head dimension
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn import functional as F

from ebft.machine import copy_to
from ebft.prefix.attention import flex
from ebft.prefix.attention.batches import MOST_PADDING, DocumentBatch, grouped, places_of
from ebft.prefix.attention.passes import MaskPattern, PrefixPass, document_attention, sink_rows
from ebft.prefix.attention.states import Layer, along_documents
from ebft.prefix.attention.tiles import AttentionScores, Own, Tile, attend
from ebft.prefix.sampling import of_device, on_device

# Query rows per tile where scaled_dot_product_attention cannot be used.
_ROWS_PER_TILE = 4096


# Query heads whose queries are rows of one matrix; 0 for all that have the same key head.
_HEADS_AS_ROWS = {"cpu": 1, "other": 0}

_MOST_SCORES = 2**24  # of all suffixes of a batch of prompts with their keys, which bounds the memory
_FEWEST_TOKENS = 256  # of a suffix; shorter ones count as having as many scores, since keys need memory as well


@dataclass(frozen=True)
class PromptLayout:
    """Prompts with their suffixes: `prompts` are their lengths, `suffixes` the lengths of each prompt's suffixes.

    Tokens are ordered [all prompts | suffixes of the first prompt | suffixes of the second | ...].
    """

    prompts: list[int]
    suffixes: list[list[int]]
    device: torch.device

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The (start, end) of every prompt among the S tokens."""
        ends = list(accumulate(self.prompts))
        return [(end - length, end) for end, length in zip(ends, self.prompts)]

    @cached_property
    def lengths(self) -> list[int]:
        return list(chain(*self.suffixes))

    @cached_property
    def prompt_of(self) -> list[int]:
        """The number of each suffix's prompt."""
        return [number for number, lengths in enumerate(self.suffixes) for _ in lengths]

    @cached_property
    def groups(self) -> list[SuffixGroup]:
        """The suffixes of all prompts that have any, together for adjacent prompts if `batches` says so."""
        suffixes = [[length for length in own if length] for own in self.suffixes]
        return self._groups(batches(self.prompts, suffixes, self.device), suffixes)

    @cached_property
    def groups_by_prompt(self) -> list[SuffixGroup]:
        """The suffixes of every prompt that has any, separately for each prompt."""
        suffixes = [[length for length in own if length] for own in self.suffixes]
        return self._groups([[number] for number, own in enumerate(suffixes) if own], suffixes)

    def _groups(self, prompts: list[list[int]], suffixes: list[list[int]]) -> list[SuffixGroup]:
        groups, first = [], 0
        for numbers in prompts:
            lengths = [length for number in numbers for length in suffixes[number]]
            groups.append(SuffixGroup(DocumentBatch([self.spans[i] for i in numbers], self.device), first, lengths))
            first += sum(lengths)
        return groups


def batches(prompts: list[int], suffixes: list[list[int]], device: torch.device) -> list[list[int]]:
    """Return the numbers of all prompts with suffixes; of adjacent ones together if they are to be computed at once.

    These have equally many suffixes. `suffixes` are the lengths of each prompt's suffixes, all above 0.
    """
    with_any = [number for number, lengths in enumerate(suffixes) if lengths]
    return grouped(with_any, lambda numbers: _fit(numbers, prompts, suffixes, of_device(MOST_PADDING, device)))


def _fit(numbers: list[int], prompts: list[int], suffixes: list[list[int]], most_padding: float) -> bool:
    count = len(suffixes[numbers[0]])
    if any(len(suffixes[i]) != count for i in numbers):
        return False
    sizes = [(prompts[i] + max(suffixes[i]), max(suffixes[i])) for i in numbers]
    keys, queries = (max(size) for size in zip(*sizes))
    padded = len(numbers) * keys * queries
    is_small = padded * count * max(1, _FEWEST_TOKENS // queries) <= _MOST_SCORES
    return is_small and padded <= most_padding * sum(keys * queries for keys, queries in sizes)


@dataclass(frozen=True, eq=False)
class SuffixGroup:
    """The suffixes of some prompts: `first` is the index of their first token among the X, `lengths` are above 0."""

    prompts: DocumentBatch
    first: int
    lengths: list[int]

    @property
    def tokens(self) -> slice:
        """The group's tokens among the X."""
        return slice(self.first, self.first + sum(self.lengths))

    @cached_property
    def _entries(self) -> Tensor | None:
        """Index of each token among the N * L entries of the suffixes, padded to the longest; None without padding."""
        return places_of(self.lengths, self.prompts.device)

    def padded(self, x: Tensor) -> Tensor:
        """Return x (Y, tokens, D) of the group's tokens as (Y, N, L, D), with zeros as padding."""
        n, length = len(self.lengths), max(self.lengths)
        if self._entries is not None:
            x = x.new_zeros(len(x), n * length, x.shape[-1]).index_copy(1, self._entries, x)
        return x.unflatten(1, (n, length))

    def unpadded(self, x: Tensor) -> Tensor:
        """Return x (N, L, ...) without padding: (tokens, ...)."""
        x = x.flatten(0, 1)
        return x if self._entries is None else x.index_select(0, self._entries)

    def mask(self, pattern: MaskPattern, times: int) -> Tensor:
        """Return which keys the L queries of a suffix, repeated `times`, attend to: (times * L, P + L) bool.

        With an additional dimension for suffixes and one for heads, (N, 1), if prompts have different lengths.
        """

        def make() -> Tensor:
            prompts, device = self.prompts, self.prompts.device
            index = torch.arange(prompts.longest + max(self.lengths), device=device)
            if not prompts.is_padded:
                return pattern.allowed(index[prompts.longest :, None], index).repeat(times, 1)
            lengths = on_device(prompts.lengths, device)[:, None]  # (G, 1)
            position, is_padding = padded_positions(index, prompts.longest, lengths)
            query = (lengths + index[: max(self.lengths)]).unsqueeze(-1)  # (G, L, 1)
            seen = pattern.allowed(query, position.unsqueeze(1)) & ~is_padding.unsqueeze(1)
            return seen.repeat_interleave(len(self.lengths) // len(seen), 0).repeat(1, times, 1).unsqueeze(1)

        return pattern.keep(("suffixes", self, times), make)


def padded_positions(index: Tensor, longest: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions of keys (P + U,) after prompts of `lengths` (Y, 1) padded to `longest`, and which are padding.

    Both are (Y, P + U).
    """
    is_own = index >= longest
    return torch.where(is_own, index - longest + lengths, index), ~is_own & (index >= lengths)


@dataclass
class SuffixPass(PrefixPass):
    """A pass over [prompts | suffixes]; with `keeps_keys`, keys and values of all tokens are stored in the cache."""

    layout: PromptLayout
    keeps_keys: bool = False

    def position_ids(self) -> Tensor:
        layout = self.layout
        starts = [layout.prompts[number] for number in layout.prompt_of]
        parts = [torch.arange(length) for length in layout.prompts]
        parts += [torch.arange(start, start + length) for start, length in zip(starts, layout.lengths)]
        return copy_to(layout.device, torch.cat(parts)[None])[0]

    def tokens(self) -> flex.Visibility | None:
        if self.keeps_keys:  # which flex_attention does not
            return None
        device, layout = self.layout.device, self.layout
        lengths = torch.tensor(layout.lengths, dtype=torch.long)  # also if there are no suffixes
        prompt = torch.tensor(layout.prompt_of, dtype=torch.long).repeat_interleave(lengths)
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        prefix = torch.tensor(layout.prompts)[prompt]
        document, owner, prefix = copy_to(device, prompt, owner, prefix)
        return flex.Visibility.of(layout.spans, self.position_ids()[0], document, owner, prefix)

    def advance(self, call, layer: Layer, hidden: Tensor) -> Tensor:
        if self.keeps_keys or self.layout.lengths:
            return super().advance(call, layer, hidden)
        return along_documents(layer, hidden, self.layout.spans, [[] for _ in self.layout.spans])[0]

    def attend(self, call, query, key, value, pattern, scores, sinks) -> Tensor:
        if self.keeps_keys:
            self.cache[call] = (key, value)
        spans = self.layout.spans
        s = spans[-1][1]
        prompts = key[:, :s], value[:, :s]
        has_kernel = scores.softcap is None and sinks is None
        attend_group = _with_kernel if has_kernel else _with_tiles
        outputs = [document_attention(spans, query[:, :, :s], *prompts, pattern, scores, sinks)]
        for group in self.layout.groups if has_kernel else self.layout.groups_by_prompt:
            of_prompts = tuple(group.prompts.of(x) for x in prompts)  # (K, G, P, D)
            of_group = tuple(group.padded(x[:, s:][:, group.tokens]) for x in (key, value))  # (K, N, L, D)
            queries = group.padded(query[:, :, s:][:, :, group.tokens].flatten(0, 1))  # (H, N, L, D)
            output = attend_group(group, queries, of_prompts, of_group, pattern, scores, sinks)
            outputs.append(group.unpadded(output))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _with_kernel(group, query, prompts, own, pattern, scores, sinks) -> Tensor:
    """Attention of padded suffixes by scaled_dot_product_attention, with the prompts' keys repeated: (N, L, H, D)."""
    joined = []  # the keys, and the values, of prompts and suffixes: (N, K, P + L, D)
    for of_prompts, of_suffixes in zip(prompts, own):
        of_suffixes = of_suffixes.unflatten(1, (len(group.prompts.spans), -1)).permute(1, 2, 0, 3, 4)
        repeated = of_prompts.transpose(0, 1).unsqueeze(1).expand(-1, of_suffixes.shape[1], -1, -1, -1)
        joined.append(torch.cat([repeated, of_suffixes], 3).flatten(0, 1))
    key, value = joined
    # Rows, because the memory-efficient CUDA kernel takes a mask, but not several query heads for a key head.
    heads = of_device(_HEADS_AS_ROWS, query.device) or len(query) // key.shape[1]
    rows = query.unflatten(0, (-1, heads)).permute(2, 0, 1, 3, 4)  # (N, H / heads, heads, L, D)
    output = F.scaled_dot_product_attention(
        rows.flatten(2, 3).to(value.dtype),  # with autocast, float32 after the rotary embedding
        key.to(value.dtype),
        value,
        attn_mask=group.mask(pattern, heads),
        dropout_p=scores.dropout,
        scale=scores.scaling,
        enable_gqa=rows.shape[1] != key.shape[1],
    )
    return output.unflatten(2, (heads, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _with_tiles(group, query, prompts, own, pattern, scores: AttentionScores, sinks) -> Tensor:
    """The same attention in tiles, for models that cap scores or have attention sinks, of one prompt: (N, L, H, D)."""
    (k, n, length, _), q = own[0].shape, len(query) // len(own[0])
    prompt = tuple(x.squeeze(1) for x in prompts)
    size = prompt[0].shape[1]
    rows = query.unflatten(0, (k, q)).transpose(1, 2).flatten(1, 3)  # (K, N * Q * L, D)
    hidden = ~group.mask(pattern, 1)
    of_rows = hidden[None, None].expand(n, q, -1, -1).flatten(0, 2)  # (N * Q * L, P + L)
    # `attend` expects other keys after the shared ones, in whose place the products with own keys are written.
    key, value = (F.pad(x, (0, 0, 0, length)) for x in prompt)
    per_tile = max(1, _ROWS_PER_TILE // (q * length)) * q * length
    tiles = [
        Tile(
            slice(first, min(first + per_tile, len(of_rows))), slice(0, size), of_rows[first : first + per_tile, :size]
        )
        for first in range(0, len(of_rows), per_tile)
    ]
    output = attend(rows, key, value, Own(*own, of_rows[:, size:]), tiles, scores, sink_rows(sinks, k, q, length))
    return output.view(k, n, q, length, -1).permute(1, 3, 0, 2, 4).flatten(2, 3)
