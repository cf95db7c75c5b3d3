"""Full completions of prompts: each prompt is computed once, and rows leave the batch where their completion ends.

A completion ends with the end token, at the task's stop pattern, or after `max_new_tokens`. Noise belongs to the seed,
the prompt's number and the sample's, so that it is the same for every model, whatever shares a batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ebft.transformers_internals import cache_argument

# Where a completion ends: at the first line that is not indented, or with its line. Ends of functions are those of the
# stop sequences of HumanEval (def, class, if, print, #), which all begin a line.
STOPS = {"functions": re.compile(r"\n(?=\S)"), "translation": re.compile(r"\n")}


@dataclass
class Sampler:
    """Samples completions of a model in eval mode; `rows` completions are decoded at once."""

    model: nn.Module
    tokenizer: Any
    stop: re.Pattern
    max_new_tokens: int
    seed: int = 0
    rows: int = 64

    def complete(self, prompts: list[str], samples: int, temperature: float) -> list[list[str]]:
        """`samples` completions of every prompt, without what ends them; temperature 0 is greedy."""
        encoded = [self.tokenizer(prompt, verbose=False)["input_ids"] for prompt in prompts]
        order = sorted(range(len(prompts)), key=lambda number: len(encoded[number]))
        found: list[list[str]] = [[] for _ in prompts]
        size = max(1, self.rows // samples)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            texts = self._batch([encoded[number] for number in chosen], chosen, samples, temperature)
            for place, number in enumerate(chosen):
                found[number] = texts[place * samples : (place + 1) * samples]
        return found

    @torch.inference_mode()
    def _batch(self, prompts: list[list[int]], numbers: list[int], samples: int, temperature: float) -> list[str]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.tokenizer.pad_token_id] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids, mask, cache)
        cache.batch_repeat_interleave(samples)
        logits, mask = logits.repeat_interleave(samples, 0), mask.repeat_interleave(samples, 0)
        noise = self._noise(numbers, samples)
        tokens: list[list[int]] = [[] for _ in range(len(prompts) * samples)]
        alive = list(range(len(tokens)))
        for step in range(self.max_new_tokens):
            drawn = draw(logits, temperature, noise[alive, step])
            for row, token in zip(alive, drawn.tolist()):
                tokens[row].append(token)
            kept = [place for place, row in enumerate(alive) if not self._has_ended(tokens[row])]
            if not kept:
                break
            if len(kept) < len(alive):
                alive = [alive[place] for place in kept]
                cache.batch_select_indices(torch.tensor(kept))
                mask, drawn = mask[kept], drawn[kept]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
            logits = self._forward(drawn[:, None], mask, cache)
        return [self.text(row) for row in tokens]

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Logits (rows, vocabulary) of the next token."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        kept = {cache_argument(self.model): cache, "logits_to_keep": 1}
        output = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **kept)
        return output.logits[:, -1].float()

    def _noise(self, numbers: list[int], samples: int) -> Tensor:
        """Uniform numbers (rows, max_new_tokens)."""
        return torch.cat([self._noise_of(number, samples) for number in numbers])

    def _noise_of(self, number: int, samples: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return torch.rand(samples, self.max_new_tokens, generator=generator)

    def _has_ended(self, tokens: list[int]) -> bool:
        return tokens[-1] == self.tokenizer.eos_token_id or self.stop.search(self._decoded(tokens)) is not None

    def text(self, tokens: list[int]) -> str:
        """The completion that token ids are, up to where it ends."""
        text = self._decoded(tokens[:-1] if tokens[-1] == self.tokenizer.eos_token_id else tokens)
        end = self.stop.search(text)
        return text if end is None else text[: end.start()] + "\n"

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def draw(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Token ids (rows,) of logits (rows, vocabulary), by the inverse of the distribution function at `uniform`."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = (logits / temperature).softmax(-1).cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniform[:, None] * cumulative[:, -1:]))
    return drawn[:, 0].clamp(max=logits.shape[1] - 1)
