"""Attention over [prompts | suffixes]: each prompt is followed by suffixes of different lengths, without padding.

S  prompt tokens     X  suffix tokens      P  tokens of a prompt    N  suffixes of a prompt    L  longest suffix
H  query heads       K  key/value heads    Q = H / K                D  head dimension
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from ebft.prefix.attention import flex
from ebft.prefix.attention.passes import Call, MaskPattern, PrefixPass, document_attention, sink_rows
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
    def lengths(self) -> list[int]:
        """The length of each suffix."""
        return list(chain(*self.suffixes))

    @cached_property
    def prompt_of(self) -> list[int]:
        """The number of each suffix's prompt."""
        return [number for number, lengths in enumerate(self.suffixes) for _ in lengths]

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
    def _entries(self) -> Tensor | None:
        """Index of each token among the N * L entries of the suffixes, padded to the longest; None without padding."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return None
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]
        return (torch.arange(longest, device=self.device) < lengths).flatten().nonzero().squeeze(1)

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
        starts = [layout.prompts[number] for number in layout.prompt_of]
        parts = [torch.arange(length, device=device) for length in layout.prompts]
        parts += [start + torch.arange(n, device=device) for start, n in zip(starts, layout.lengths)]
        return torch.cat(parts)[None]

    def tokens(self) -> flex.Tokens | None:
        if self.keeps_keys:  # which flex_attention does not
            return None
        device, layout = self.layout.device, self.layout
        integers = {"dtype": torch.long, "device": device}  # also if there are no suffixes
        lengths = torch.tensor(layout.lengths, **integers)
        prompt = torch.tensor(layout.prompt_of, **integers).repeat_interleave(lengths)
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
        position = torch.arange(length + max(group.lengths), device=group.device)
        return pattern.allowed(position[length:, None], position)

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


_GROWTH = 64  # own tokens by which the cache grows
_SHORT = 128  # tokens of the longest prompt up to which prompts are copied


class SharedCache:
    """Keys and values of every layer after a `SuffixPass` with `keeps_keys`, one suffix (possibly empty) per sample.

    `prompt_of` is the number of each sample's prompt, in increasing order; `lengths` (N,) the number of own tokens.
    """

    def __init__(self, prefill: SuffixPass):
        layout = prefill.layout
        self.layout: PromptLayout = layout
        self.prompt_of = layout.prompt_of
        self._copies = max(layout.prompts) <= _SHORT
        s, copied = layout.spans[-1][1], [layout.prompts[i] if self._copies else 0 for i in self.prompt_of]
        lengths = [own + prompt for own, prompt in zip(layout.lengths, copied)]
        self.lengths = torch.tensor(lengths, device=layout.device)
        self._used = max(lengths)  # number of own tokens of the longest sample
        self._prompts = torch.tensor(layout.prompts, device=layout.device)[self.prompt_of]
        if self._copies:
            self._prompts = torch.zeros_like(self._prompts)
        self.prompts: dict[Call, tuple[Tensor, ...]] = {}
        self._own: dict[Call, tuple[Tensor, ...]] = {}
        rows = torch.arange(len(lengths), device=layout.device).repeat_interleave(self.lengths)
        steps = torch.cat([torch.arange(length, device=layout.device) for length in lengths])
        source = torch.tensor(self._source(), dtype=torch.long, device=layout.device)
        for call, keys_and_values in prefill.cache.items():
            self.prompts[call] = tuple(x[:, : 0 if self._copies else s] for x in keys_and_values)
            own = tuple(x.new_zeros(len(x), len(lengths), self._used + _GROWTH, x.shape[-1]) for x in keys_and_values)
            for padded, x in zip(own, keys_and_values):
                padded[:, rows, steps] = x[:, source]
            self._own[call] = own

    def _source(self) -> list[int]:
        """Return the index, in the prefill, of each token that is stored for a sample."""
        found, end = [], self.layout.spans[-1][1]
        for prompt, length in zip(self.prompt_of, self.layout.lengths):
            found += range(*self.layout.spans[prompt]) if self._copies else ()
            found += range(end, end + length)
            end += length
        return found

    def positions(self) -> Tensor:
        """Return the position of every sample's next token: (N,)."""
        return self._prompts + self.lengths

    def append(self, call: Call, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next token's key and value (K, N, D), and return the call's own ones: (K, N, U, D)."""
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        own = self._own[call]
        if own[0].shape[2] == self._used:
            own = tuple(F.pad(x, (0, 0, 0, _GROWTH)) for x in own)
            self._own[call] = own
        for stored, x in zip(own, (key, value)):
            stored[:, rows, self.lengths] = x.to(stored.dtype)
        return tuple(x[:, :, : self._used + 1] for x in own)

    def advance(self) -> None:
        """Count the token that `append` stored in every layer."""
        self.lengths = self.lengths + 1
        self._used += 1

    def keep(self, samples: Tensor) -> None:
        """Drop all samples except those with the given indices, in increasing order."""
        self.lengths, self._prompts = self.lengths[samples], self._prompts[samples]
        self.prompt_of = [self.prompt_of[index] for index in samples.tolist()]
        self._own = {call: tuple(x[:, samples] for x in own) for call, own in self._own.items()}

    def groups(self) -> list[tuple[tuple[int, int], slice]]:
        """Return the span of every prompt that has samples, and the indices of these; (0, 0) for all copied prompts."""
        if self._copies:
            return [((0, 0), slice(0, len(self.lengths)))]
        found, first = [], 0
        for number, samples in groupby(self.prompt_of):
            stop = first + len(list(samples))
            found.append((self.layout.spans[number], slice(first, stop)))
            first = stop
        return found


@dataclass
class DecodePass(PrefixPass):
    """A pass over the next token of every sample of a `SharedCache`, without gradients."""

    samples: SharedCache

    def position_ids(self) -> Tensor:
        return self.samples.positions()[None]

    def attend(self, call, query, key, value, pattern, scores, sinks) -> Tensor:
        own_key, own_value = self.samples.append(call, key, value)
        prompt_key, prompt_value = self.samples.prompts[call]
        outputs = []
        for (start, end), samples in pattern.keep("groups", self.samples.groups):
            own = own_key[:, samples], own_value[:, samples]
            prompt = prompt_key[:, start:end], prompt_value[:, start:end]
            hidden = self._hidden(pattern, samples, end - start, own_key.shape[2])
            outputs.append(_attend(query[:, :, samples], prompt, own, hidden, scores, sinks))
        return torch.cat(outputs)

    def _hidden(self, pattern: MaskPattern, samples: slice, prompt: int, own: int) -> Tensor | None:
        """Return the keys that a prompt's samples do not attend to, (n, P + U) bool; None if there are none."""

        def make() -> Tensor | None:
            query = self.samples.positions()[samples, None]
            seen = pattern.allowed(query, torch.arange(prompt + own, device=query.device))
            return None if seen.all() else ~seen

        return pattern.keep((samples.start, prompt), make)


def _attend(query: Tensor, prompt, own, hidden: Tensor | None, scores: Scores, sinks: Tensor | None) -> Tensor:
    """Compute attention of query (K, Q, n, D) to keys and values of the prompt, (K, P, D), and own, (K, n, U, D).

    A single softmax, in float32, covers both. Returns (n, H, D).
    """
    k, q, n, d = query.shape
    if prompt[0].shape[1] == 0 and scores.softcap is None and sinks is None:
        mask = None if hidden is None else ~hidden[:, None, None]
        rows = query.permute(2, 0, 1, 3).reshape(n, k * q, 1, d).to(own[1].dtype)
        key, value = (x.transpose(0, 1) for x in own)
        return F.scaled_dot_product_attention(
            rows, key.to(rows.dtype), value, mask, scale=scores.scaling, enable_gqa=q > 1
        ).squeeze(2)
    query = query.transpose(1, 2).to(own[1].dtype)  # (K, n, Q, D)
    of_prompt = (query.flatten(1, 2) @ prompt[0].to(query.dtype).mT).view(k, n, q, -1)
    weights = torch.cat([of_prompt, query @ own[0].to(query.dtype).mT], -1).float() * scores.scaling
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    if hidden is not None:
        weights.masked_fill_(hidden[:, None], float("-inf"))
    if sinks is not None:
        weights = torch.cat([weights, sinks.float().view(k, 1, q, 1).expand(-1, n, -1, -1)], -1)
    weights = weights.softmax(-1).to(query.dtype)
    p, u = of_prompt.shape[-1], own[0].shape[2]
    output = (weights[..., :p].flatten(1, 2) @ prompt[1]).view(k, n, q, -1) + weights[..., p : p + u] @ own[1]
    return output.transpose(0, 1).flatten(1, 2)
