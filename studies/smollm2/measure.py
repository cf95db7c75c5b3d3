"""Measures a model on documents of its task: short and long rollouts, and full completions.

A measurement is {"metrics": means, "per_document": {metric: {"document", "sum", "weight"}}, ...}, as in the JSON of
`ebft evaluate`. Completions end with the end token, with their line, or after `max_new_tokens`; their noise
belongs to the prompt's and the sample's number, so that it is the same for every model, whatever shares a batch.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch
from cells import Cell, Study, config_file
from data import read_rows
from sacrebleu.metrics import CHRF
from torch import Tensor, nn
from transformers import DynamicCache

from ebft import evaluate, load_config
from ebft.models.pretrained import load_tokenizer
from ebft.tools.evaluation.models import load_subject
from ebft.transformers_internals import cache_argument

CHRF_OF, STOP = CHRF(), "\n"
DOCUMENTS, SAMPLES, MAX_NEW_TOKENS = 96, 4, 96  # whose completions are sampled
# What each document adds to a metric is kept for intervals, but of these, which no table shows.
NOT_KEPT = re.compile(r"(ce_loss_all|cfm_loss_plugin|cfm_loss_whitened)$|(alignment|reward)_pass")
Measured = dict[str, Any]


def measured(study: Study, cell: Cell) -> Measured:
    """Everything that is measured of the cell's model; metrics of long rollouts end in `_long`."""
    short, full, long = features(study, cell, "test"), completions(study, cell), features(study, cell, "long")
    found: Measured = {"metrics": {}, "per_document": {}, "measured_on": {}}
    for part, suffix, one in (("test", "", short), ("test", "", full), ("long", "_long", long)):
        wanted = ("cfm_loss", "diversity") if suffix else one["metrics"]
        found["metrics"] |= {f"{name}{suffix}": one["metrics"][name] for name in wanted}
        kept = [name for name in wanted if name in one["per_document"] and not NOT_KEPT.match(name)]
        parts = {f"{name}{suffix}": one["per_document"][name] for name in kept}
        found["per_document"] |= parts
        found["measured_on"] |= dict.fromkeys(parts, f"translation_{part}")
    return found


def features(study: Study, cell: Cell, part: str) -> Measured:
    """Cross-entropy and feature matching on a part of the data of the cell's task."""
    config = load_config(config_file("evaluation"), study.evaluation(cell, part))
    return evaluate(config, models=[study.model(cell)]).to_dict()["models"][0]


def completions(study: Study, cell: Cell) -> Measured:
    """The chrF of greedy translations and of samples at temperature 1, and how much the samples of a prompt differ."""
    line = lambda text: text.strip(" ").partition("\n")[0].strip()  # the translation that a completion gives
    every = read_rows(study.data("test"))
    documents, samples, longest = (4, 2, 8) if study.is_tiny else (DOCUMENTS, SAMPLES, MAX_NEW_TOKENS)
    count = min(documents, len(every))
    numbers = [index * len(every) // count for index in range(count)]  # with equal gaps
    rows = [every[number] for number in numbers]
    sampler, prompts = Sampler(*loaded(study, cell)[:2], longest), [row["input"] for row in rows]
    best = [texts[0] for texts in sampler.complete(prompts, 1, 0.0)]
    drawn = sampler.complete(prompts, samples, 1.0)
    values: dict[str, list[float]] = {}
    for row, greedy, texts in zip(rows, best, drawn):
        first, *others = (similarity(line(text), line(row["output"])) for text in (greedy, *texts))
        scores = {"chrf_greedy": first, "chrf_pass@1": sum(others) / len(others), "chrf_pass@N": max(others)}
        pairs = [1 - similarity(one, other) for one, other in itertools.permutations(texts, 2)]
        scores |= {"pair_distance": sum(pairs) / len(pairs), "distinct": (len(set(texts)) - 1) / (len(texts) - 1)}
        for name, value in scores.items():
            values.setdefault(name, []).append(value)
    parts = {name: {"document": numbers, "sum": each, "weight": [1.0] * len(each)} for name, each in values.items()}
    metrics = {name: sum(each) / len(each) for name, each in values.items()}
    return {"metrics": metrics, "per_document": parts}


def similarity(text: str, other: str) -> float:
    """Sentence chrF of one text against another, from 0 to 1; of two empty ones 1."""
    return 1.0 if text == other else CHRF_OF.sentence_score(text, [other]).score / 100


def loaded(study: Study, cell: Cell) -> tuple[Any, Any, Any]:
    """The cell's model in eval mode, its tokenizer, and the config of its measurements."""
    config = load_config(config_file("evaluation"), study.evaluation(cell, "test"))
    tokenizer = load_tokenizer(config)
    return load_subject(config, study.model(cell), tokenizer).policy, tokenizer, config


@dataclass
class Sampler:
    """Samples completions: each prompt is computed once, and rows leave the batch where their completion ends."""

    model: nn.Module
    tokenizer: Any
    max_new_tokens: int
    rows: int = 64  # decoded at once

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
        logits = self._forward(ids, mask, cache).repeat_interleave(samples, 0)
        cache.batch_repeat_interleave(samples)
        mask = mask.repeat_interleave(samples, 0)
        noise = torch.cat(
            [torch.rand(samples, self.max_new_tokens, generator=torch.Generator().manual_seed(n)) for n in numbers]
        )
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
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **kept).logits[:, -1].float()

    def _has_ended(self, tokens: list[int]) -> bool:
        return tokens[-1] == self.tokenizer.eos_token_id or STOP in self._decoded(tokens)

    def text(self, tokens: list[int]) -> str:
        """The completion that token ids are, up to where it ends."""
        text = self._decoded(tokens[:-1] if tokens[-1] == self.tokenizer.eos_token_id else tokens)
        first, stop, _ = text.partition(STOP)
        return first + stop

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def draw(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Token ids (rows,) of logits (rows, vocabulary), by the inverse of the distribution function at `uniform`."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = (logits / temperature).softmax(-1).cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniform[:, None] * cumulative[:, -1:]))
    return drawn[:, 0].clamp(max=logits.shape[1] - 1)
