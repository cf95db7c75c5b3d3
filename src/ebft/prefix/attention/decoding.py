"""Decoding of samples that share prompts: their cache, and attention of the next token of every sample.

P  tokens of the longest prompt     U  tokens of the longest sample, with the next one
G  prompts      M  most samples of a prompt      N  samples      n  samples of G prompts
H  query heads      K  key/value heads      Q = H / K      D  head dimension
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from ebft.prefix.attention.batches import DocumentBatch
from ebft.prefix.attention.passes import Call, MaskPattern, PrefixPass
from ebft.prefix.attention.suffixes import SuffixPass, batches, padded_positions
from ebft.prefix.attention.tiles import AttentionScores
from ebft.prefix.sampling import on_device

_GROWTH = 64  # fewest own tokens by which the cache grows; it doubles if it has more
_SHORT = 128  # tokens of the longest prompt up to which prompts are copied


class SharedCache:
    """Keys and values of every layer after a `SuffixPass` with `keeps_keys`, one suffix (possibly empty) per sample.

    `prompt_of` is the number of each sample's prompt, in increasing order; `lengths` the number of own tokens of each.
    At most `room` tokens are added to a sample. `prompts` are the keys and values of each call, for every batch of
    prompts in `groups`, which replace those in the pass.
    """

    def __init__(self, prefill: SuffixPass, room: int):
        layout = prefill.layout
        self.prompt_of: list[int] = layout.prompt_of
        self._copies = max(layout.prompts) <= _SHORT
        copied = [layout.prompts[i] if self._copies else 0 for i in self.prompt_of]
        self.lengths: list[int] = [own + prompt for own, prompt in zip(layout.lengths, copied)]
        self._used = max(self.lengths)  # number of own tokens of the longest sample
        self._most = self._used + room
        self._room = min(self._used + _GROWTH, self._most)
        positions = [layout.prompts[i] + own for i, own in zip(self.prompt_of, layout.lengths)]
        self._next = on_device([positions, self.lengths], layout.device)  # position and own place of the next token
        self._rows = torch.arange(len(self.lengths), device=layout.device)
        numbers = batches(layout.prompts, [[1] * len(own) for own in layout.suffixes], layout.device)
        self._numbers = [list(range(len(layout.prompts)))] if self._copies else numbers
        spans = [[(0, 0)] if self._copies else [layout.spans[i] for i in batch] for batch in self._numbers]
        self._batches = [DocumentBatch(each, layout.device) for each in spans]
        self.groups: list[SampleGroup] = self._grouped()
        self.prompts: dict[Call, list[tuple[Tensor, ...]]] = {}
        self._own: dict[Call, tuple[Tensor, ...]] = {}
        rows = on_device([row for row, length in enumerate(self.lengths) for _ in range(length)], layout.device)
        steps = on_device([step for length in self.lengths for step in range(length)], layout.device)
        source, end = [], layout.spans[-1][1]  # the index, in the prefill, of each token that is stored for a sample
        for prompt, length in zip(self.prompt_of, layout.lengths):
            source += [*(range(*layout.spans[prompt]) if self._copies else ()), *range(end, end + length)]
            end += length
        source = on_device(source, layout.device)
        for call in list(prefill.cache):
            whole = prefill.cache.pop(call)
            of_prompts = [tuple(batch.of(x) for x in whole) for batch in self._batches]
            self.prompts[call] = [tuple(x.clone() if self._copies else x.contiguous() for x in xs) for xs in of_prompts]
            own = tuple(x.new_zeros(len(x), *self.shape, x.shape[-1]) for x in whole)
            for padded, x in zip(own, whole):
                padded[:, rows, steps] = x[:, source]
            self._own[call] = own

    def _grouped(self) -> list[SampleGroup]:
        """Return the samples of every batch of prompts that has any; the samples of copied prompts are one group."""
        groups, first = [], 0
        for number, (prompts, numbers) in enumerate(zip(self._batches, self._numbers)):
            counts = [self.prompt_of.count(i) for i in numbers]
            rows = slice(first, first + sum(counts))
            first = rows.stop
            if sum(counts):
                groups.append(SampleGroup(number, prompts, rows, [sum(counts)] if self._copies else counts))
        return groups

    @property
    def shape(self) -> tuple[int, int]:
        """The number of samples, and of own tokens for which there is room. Passes of one shape use the same memory."""
        return len(self.lengths), self._room

    def positions(self) -> Tensor:
        """Return the position of every sample's next token: (N,)."""
        return self._next[0]

    def own_places(self) -> Tensor:
        """Return the number of own tokens of every sample, `lengths`, on the device: (N,)."""
        return self._next[1]

    def append(self, call: Call, key: Tensor, value: Tensor, all_room: bool) -> tuple[Tensor, Tensor]:
        """Store the next token's key and value (K, N, D), and return the call's own ones: (K, N, U, D).

        With `all_room`, zeros follow up to the room that there is.
        """
        for stored, x in zip(self._own[call], (key, value)):
            stored[:, self._rows, self._next[1]] = x.to(stored.dtype)
        width = self._room if all_room else self._used + 1
        return tuple(x[:, :, :width] for x in self._own[call])

    def advance(self) -> None:
        """Count the token that `append` stored in every layer, and make room for the next one."""
        self.lengths = [length + 1 for length in self.lengths]
        self._next += 1
        self._used += 1
        if self._used == self._room < self._most:
            added = min(max(_GROWTH, self._used), self._most - self._used)
            self._own = {call: tuple(F.pad(x, (0, 0, 0, added)) for x in own) for call, own in self._own.items()}
            self._room += added

    def keep(self, samples: list[int], index: Tensor) -> None:
        """Drop all samples except those with the given indices, in increasing order; `index` has them on the device."""
        self.lengths = [self.lengths[sample] for sample in samples]
        self.prompt_of = [self.prompt_of[sample] for sample in samples]
        self._next, self._rows = self._next[:, index], self._rows[: len(samples)]
        self._own = {call: tuple(x[:, index] for x in own) for call, own in self._own.items()}
        self.groups = self._grouped()


@dataclass(eq=False)
class SampleGroup:
    """The samples at `rows` of the N, which follow the batch of prompts with this number; `counts` (G,) of each."""

    number: int
    prompts: DocumentBatch
    rows: slice
    counts: list[int]

    @cached_property
    def _by_prompt(self) -> DocumentBatch:
        """The samples of the prompts, which are as many as the most of one after `of`; any for those dropped."""
        ends = list(accumulate(self.counts))
        return DocumentBatch([(end - count, end) for end, count in zip(ends, self.counts)], self.prompts.device)

    def by_prompt(self, x: Tensor) -> Tensor:
        """Return x (K, n, Q, Y) of the samples as (K, G, M * Q, Y)."""
        return self._by_prompt.of(x).flatten(2, 3)

    def by_sample(self, x: Tensor, q: int) -> Tensor:
        """Return x (K, G, M * Q, Y) as (K, n, Q, Y)."""
        return self._by_prompt.in_order(x.unflatten(2, (-1, q)), 1)


@dataclass
class DecodePass(PrefixPass):
    """A pass over the next token of every sample of a `SharedCache`, without gradients.

    `all_room`: attention reads all the room for own tokens, with a mask, so that passes have one shape.
    """

    samples: SharedCache
    all_room: bool = False

    def position_ids(self) -> Tensor:
        return self.samples.positions()[None]

    def attend(self, call, query, key, value, pattern, scores, sinks) -> Tensor:
        own_key, own_value = self.samples.append(call, key, value, self.all_room)
        outputs = []
        for group in self.samples.groups:
            own = own_key[:, group.rows], own_value[:, group.rows]
            prompts = self.samples.prompts[call][group.number]
            masks = self._masks(pattern, group, own_key.shape[2])
            outputs.append(_attend(group, query[:, :, group.rows], prompts, own, masks, scores, sinks))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _masks(self, pattern: MaskPattern, group: SampleGroup, own: int) -> tuple[Tensor, Tensor] | None:
        """Return the keys that a group's samples attend to, and the others: (n, P + U) bool; None if there are none."""
        prompts, samples = group.prompts, self.samples

        def make() -> tuple[Tensor, Tensor] | None:
            if pattern.is_causal and not prompts.is_padded and min(samples.lengths[group.rows]) == own - 1:
                return None
            query = samples.positions()[group.rows, None]
            key = torch.arange(prompts.longest + own, device=query.device)
            is_padding = None
            if prompts.is_padded:
                lengths = query - samples.own_places()[group.rows, None]
                key, is_padding = padded_positions(key, prompts.longest, lengths)
            seen = pattern.allowed(query, key)
            seen = seen if is_padding is None else seen & ~is_padding
            return seen, ~seen

        return pattern.keep(("samples", group.number), make)


def _attend(
    group: SampleGroup, query: Tensor, prompts, own, masks, scores: AttentionScores, sinks: Tensor | None
) -> Tensor:
    """Compute attention of query (K, Q, n, D) to keys and values of prompts, (K, G, P, D), and own, (K, n, U, D). A
    single softmax, in float32, covers both. Returns (n, H, D)."""
    k, q, n, d = query.shape
    if prompts[0].shape[2] == 0 and scores.softcap is None and sinks is None:
        mask = None if masks is None else masks[0][:, None, None]
        # The query heads of a key head are rows of one product, so that no kernel has to repeat keys.
        rows = query.permute(2, 0, 1, 3).to(own[1].dtype)  # (n, K, Q, D)
        key, value = (x.transpose(0, 1).to(rows.dtype) for x in own)
        return F.scaled_dot_product_attention(rows, key, value, mask, scale=scores.scaling).flatten(1, 2)
    query = query.transpose(1, 2).to(own[1].dtype)  # (K, n, Q, D)
    of_prompt = group.by_sample(group.by_prompt(query) @ prompts[0].to(query.dtype).mT, q)
    weights = torch.cat([of_prompt, query @ own[0].to(query.dtype).mT], -1).float() * scores.scaling
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    if masks is not None:
        weights.masked_fill_(masks[1][:, None], float("-inf"))
    if sinks is not None:
        weights = torch.cat([weights, sinks.float().view(k, 1, q, 1).expand(-1, n, -1, -1)], -1)
    weights = weights.softmax(-1).to(query.dtype)
    p, u = of_prompt.shape[-1], own[0].shape[2]
    output = group.by_sample(group.by_prompt(weights[..., :p]) @ prompts[1], q) + weights[..., p : p + u] @ own[1]
    return output.transpose(0, 1).flatten(1, 2)
