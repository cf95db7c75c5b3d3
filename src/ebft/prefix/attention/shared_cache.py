"""Decoding of samples that share prompts: a prompt's keys and values are stored once for all of its samples.

Short prompts are copied to the own tokens of their samples instead: one attention over all samples then costs less than
one for each prompt.

S  prompt tokens     P  tokens of a prompt    N  samples    n  samples of a prompt    U  own tokens of a sample
H  query heads       K  key/value heads       Q = H / K     D  head dimension
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from ebft.prefix.attention.passes import Call, MaskPattern, PrefixPass
from ebft.prefix.attention.suffixes import PromptLayout, SuffixPass
from ebft.prefix.attention.tiles import Scores

_GROWTH = 64  # own tokens by which the cache grows
_SHORT = 128  # tokens of the longest prompt up to which prompts are copied


class SharedCache:
    """Keys and values of every layer after a `SuffixPass` with `keeps_keys`, one suffix (possibly empty) per sample.

    `prompt_of` is the number of each sample's prompt, in increasing order; `lengths` (N,) the number of own tokens.
    """

    def __init__(self, prefill: SuffixPass):
        layout = prefill.layout
        self.layout: PromptLayout = layout
        self.prompt_of = [number for number, suffixes in enumerate(layout.suffixes) for _ in suffixes]
        suffixes = [length for suffixes in layout.suffixes for length in suffixes]
        self._copies = max(layout.prompts) <= _SHORT
        s, copied = layout.spans[-1][1], [layout.prompts[i] if self._copies else 0 for i in self.prompt_of]
        lengths = [own + prompt for own, prompt in zip(suffixes, copied)]
        self.lengths = torch.tensor(lengths, device=layout.device)
        self._used = max(lengths)  # number of own tokens of the longest sample
        self._prompts = torch.tensor(layout.prompts, device=layout.device)[self.prompt_of]
        if self._copies:
            self._prompts = torch.zeros_like(self._prompts)
        self.prompts: dict[Call, tuple[Tensor, ...]] = {}
        self._own: dict[Call, tuple[Tensor, ...]] = {}
        rows = torch.arange(len(lengths), device=layout.device).repeat_interleave(self.lengths)
        steps = torch.cat([torch.arange(length, device=layout.device) for length in lengths])
        source = torch.tensor(self._source(suffixes), dtype=torch.long, device=layout.device)
        for call, keys_and_values in prefill.cache.items():
            self.prompts[call] = tuple(x[:, : 0 if self._copies else s] for x in keys_and_values)
            own = tuple(x.new_zeros(len(x), len(lengths), self._used + _GROWTH, x.shape[-1]) for x in keys_and_values)
            for padded, x in zip(own, keys_and_values):
                padded[:, rows, steps] = x[:, source]
            self._own[call] = own

    def _source(self, suffixes: list[int]) -> list[int]:
        """Return the index, in the prefill, of each token that is stored for a sample, given the suffixes' lengths."""
        found, end = [], self.layout.spans[-1][1]
        for prompt, length in zip(self.prompt_of, suffixes):
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
            own = tuple(torch.nn.functional.pad(x, (0, 0, 0, _GROWTH)) for x in own)
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
