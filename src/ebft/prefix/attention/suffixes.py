"""Attention over [prompts | suffixes]: each prompt is followed by suffixes of different lengths, without padding.

S  prompt tokens     X  suffix tokens      P  tokens of a prompt    N  suffixes of a prompt    L  longest suffix
H  query heads       K  key/value heads    Q = H / K                D  head dimension
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from ebft.prefix.attention import flex
from ebft.prefix.attention.passes import MaskPattern, PrefixPass, document_attention, sink_rows
from ebft.prefix.attention.tiles import Own, Scores, Tile, attend

# Query rows per tile where scaled_dot_product_attention cannot be used.
_ROWS_PER_TILE = 4096


@dataclass(frozen=True)
class PromptLayout:
    """Prompts with their suffixes: `prompts` are the prompts' lengths, `suffixes` those of each prompt's suffixes.

    Tokens are ordered [all prompts | suffixes of the first prompt | suffixes of the second | ...].
    """

    prompts: list[int]
    suffixes: list[list[int]]
    device: torch.device

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The (start, end) of every prompt among the S tokens."""
        ends = torch.tensor(self.prompts).cumsum(0).tolist()
        return [(end - length, end) for end, length in zip(ends, self.prompts)]

    @cached_property
    def groups(self) -> list[SuffixGroup]:
        """The suffixes of every prompt that has any."""
        groups, first = [], 0
        for span, suffixes in zip(self.spans, self.suffixes):
            if sum(suffixes):
                groups.append(SuffixGroup(span, first, [x for x in suffixes if x], self.device))
            first += sum(suffixes)
        return groups


@dataclass(frozen=True, eq=False)
class SuffixGroup:
    """The suffixes of one prompt: `first` is the index of their first token among the X, `lengths` are above 0."""

    prompt: tuple[int, int]
    first: int
    lengths: list[int]
    device: torch.device

    @property
    def tokens(self) -> slice:
        """The group's tokens among the X."""
        return slice(self.first, self.first + sum(self.lengths))

    @cached_property
    def steps(self) -> Tensor:
        """Indices of the tokens in a suffix: (L,)."""
        return torch.arange(max(self.lengths), device=self.device)

    @cached_property
    def is_token(self) -> Tensor | None:
        """Which entries of the suffixes, padded to the longest, are tokens: (N, L); None if all are."""
        if min(self.lengths) == max(self.lengths):
            return None
        return self.steps < torch.tensor(self.lengths, device=self.device)[:, None]

    @cached_property
    def _entries(self) -> Tensor | None:
        """Index of each token among the N * L entries; None without padding."""
        return None if self.is_token is None else self.is_token.flatten().nonzero().squeeze(1)

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


@dataclass
class SuffixPass(PrefixPass):
    """A pass over [prompts | suffixes]; with `keeps_keys`, keys and values of all tokens are stored in the cache."""

    layout: PromptLayout
    keeps_keys: bool = False

    def position_ids(self) -> Tensor:
        device, layout = self.layout.device, self.layout
        starts = [start for start, lengths in zip(layout.prompts, layout.suffixes) for _ in lengths]
        parts = [torch.arange(length, device=device) for length in layout.prompts]
        parts += [start + torch.arange(n, device=device) for start, n in zip(starts, chain(*layout.suffixes))]
        return torch.cat(parts)[None]

    def tokens(self) -> flex.Tokens | None:
        if self.keeps_keys:  # which flex_attention does not
            return None
        device, layout = self.layout.device, self.layout
        integers = {"dtype": torch.long, "device": device}  # also if there are no suffixes
        lengths = torch.tensor([length for lengths in layout.suffixes for length in lengths], **integers)
        prompt = [number for number, lengths in enumerate(layout.suffixes) for _ in lengths]
        prompt = torch.tensor(prompt, **integers).repeat_interleave(lengths)
        return flex.Tokens.of(
            layout.spans,
            self.position_ids()[0],
            document=prompt,
            owner=torch.arange(len(lengths), device=device).repeat_interleave(lengths),
            prefix=torch.tensor(layout.prompts, device=device)[prompt],
        )

    def attend(self, call, query, key, value, pattern, scores, sinks) -> Tensor:
        if self.keeps_keys:
            self.cache[call] = (key, value)
        spans = self.layout.spans
        s = spans[-1][1]
        prompts = key[:, :s], value[:, :s]
        attend_group = _with_kernel if scores.softcap is None and sinks is None else _with_tiles
        outputs = [document_attention(spans, query[:, :, :s], *prompts, pattern, scores, sinks)]
        for group in self.layout.groups:
            start, end = group.prompt
            of_prompt = tuple(x[:, start:end] for x in prompts)
            of_group = tuple(group.padded(x[:, s:][:, group.tokens]) for x in (key, value))  # (K, N, L, D)
            queries = group.padded(query[:, :, s:][:, :, group.tokens].flatten(0, 1))  # (H, N, L, D)
            output = attend_group(group, queries, of_prompt, of_group, pattern, scores, sinks)
            outputs.append(group.unpadded(output))
        return torch.cat(outputs)


def _with_kernel(group, query, prompt, own, pattern, scores, sinks) -> Tensor:
    """Attention of padded suffixes by scaled_dot_product_attention, with the prompt's keys repeated: (N, L, H, D)."""
    n = len(group.lengths)
    key, value = (
        torch.cat([of_prompt.expand(n, -1, -1, -1), of_suffixes.transpose(0, 1)], 2)  # (N, K, P + L, D)
        for of_prompt, of_suffixes in zip(prompt, own)
    )
    query = query.transpose(0, 1).to(value.dtype)  # with autocast, float32 after the rotary embedding
    return F.scaled_dot_product_attention(
        query,
        key.to(value.dtype),
        value,
        attn_mask=_mask(group, pattern),
        dropout_p=scores.dropout,
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    ).transpose(1, 2)


def _mask(group: SuffixGroup, pattern: MaskPattern) -> Tensor:
    """Return which of the P + L keys each of the L queries of a suffix attends to: (L, P + L) bool."""

    def make() -> Tensor:
        length = group.prompt[1] - group.prompt[0]
        position = length + group.steps
        return pattern.allowed(position[:, None], torch.arange(length + len(position), device=group.device))

    return pattern.keep(("suffixes", group), make)


def _with_tiles(group, query, prompt, own, pattern, scores: Scores, sinks) -> Tensor:
    """The same attention in tiles, for models that cap scores or have attention sinks: (N, L, H, D)."""
    (k, n, length, _), q = own[0].shape, len(query) // len(own[0])
    size = prompt[0].shape[1]
    rows = query.unflatten(0, (k, q)).transpose(1, 2).flatten(1, 3)  # (K, N * Q * L, D)
    hidden = ~_mask(group, pattern)
    of_rows = hidden[None, None].expand(n, q, -1, -1).flatten(0, 2)  # (N * Q * L, P + L)
    # `attend` expects other keys after the shared ones, in whose place the products with own keys are written.
    key, value = (F.pad(x, (0, 0, 0, length)) for x in prompt)
    own_hidden = of_rows[:, size:].unflatten(0, (n, -1))
    per_tile = max(1, _ROWS_PER_TILE // (q * length)) * q * length
    tiles = [
        Tile(
            slice(first, min(first + per_tile, len(of_rows))), slice(0, size), of_rows[first : first + per_tile, :size]
        )
        for first in range(0, len(of_rows), per_tile)
    ]
    output = attend(rows, key, value, Own(*own, own_hidden), tiles, scores, sink_rows(sinks, k, q, length))
    return output.view(k, n, q, length, -1).permute(1, 3, 0, 2, 4).flatten(2, 3)
