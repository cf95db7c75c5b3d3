"""Measures a model against the source of its texts, with the metrics of README.md.

`kl` is summed over the next words of test texts, so that only the choice of the texts is random.
"""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any

import torch
from sources import END, Source, along, draw, first_error
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

TEMPERATURES = (0.6, 0.8, 0.9, 1.0, 1.1)
TEXTS, SAMPLES, BATCH, LONGEST = 1000, 1000, 250, 80
PROMPT = "go"  # of every text


def measured(source: Source, folder: str) -> dict[str, Any]:
    """Metrics of the model in `folder`: means, and of each temperature."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in (PROMPT, END, *source.words)}
    divergences = kl(model, ids, source)
    modes = true_modes(source)
    found = {}
    for temperature in TEMPERATURES:
        texts = sampled(model, ids, temperature)
        found[str(temperature)] = {"kl": statistics.fmean(divergences[temperature]), **judged(source, texts, modes)}
    errors = {"kl": statistics.stdev(divergences[1.0]) / TEXTS**0.5, "valid": 0.5 / SAMPLES**0.5}
    return {"temperatures": found, "standard_errors": errors, **found["1.0"]}


@torch.inference_mode()
def kl(model: Any, ids: dict[str, int], source: Source) -> dict[float, list[float]]:
    """KL(source || model) of each test text, for every temperature."""
    found: dict[float, list[float]] = {temperature: [] for temperature in TEMPERATURES}
    texts = sorted(draw(source, 999, TEXTS), key=len)
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        longest = len(batch[-1]) + 1
        truth = torch.zeros(len(batch), longest, model.config.vocab_size)
        rows = torch.full((len(batch), longest), ids[END])
        for row, text in enumerate(batch):
            rows[row, : len(text) + 1] = torch.tensor([ids[word] for word in (PROMPT, *text)])
            for place, moves in enumerate(along(source, text)):
                for word, (chance, _) in moves.items():
                    truth[row, place, ids[word]] = chance
        logits = model(input_ids=rows).logits.float()
        for temperature in TEMPERATURES:
            logps = (logits / temperature).log_softmax(-1)
            entropies = torch.special.entr(truth).sum((1, 2))
            found[temperature] += (-(truth * logps).sum((1, 2)) - entropies).tolist()
    return found


@torch.inference_mode()
def sampled(model: Any, ids: dict[str, int], temperature: float) -> list[list[str]]:
    """Texts of the model, without END; one that does not end has LONGEST words."""
    torch.manual_seed(0)
    words = {number: word for word, number in ids.items()}
    options = GenerationConfig(
        do_sample=True, top_k=0, temperature=temperature, max_new_tokens=LONGEST, eos_token_id=ids[END], pad_token_id=0
    )
    texts = []
    for _ in range(SAMPLES // BATCH):
        rows: Tensor = model.generate(torch.full((BATCH, 1), ids[PROMPT]), generation_config=options)
        for row in rows[:, 1:].tolist():
            ended = row.index(ids[END]) if ids[END] in row else len(row)
            texts.append([words.get(token, "?") for token in row[:ended]])
    return texts


def true_modes(source: Source) -> dict[Any, float]:
    """The probability of each mode, from 50,000 texts."""
    texts = draw(source, 1234, 50_000)
    return {mode: count / len(texts) for mode, count in collections.Counter(map(source.mode, texts)).items()}


def judged(source: Source, texts: list[list[str]], modes: dict[Any, float]) -> dict[str, float]:
    """Validity, coverage and words until the first error of samples.

    Coverage is KL(true modes || sampled modes), with one sample more that is spread like the true modes: a mode that is
    never sampled costs its probability times the logarithm of the number of samples.
    """
    errors = [first_error(source, text) for text in texts]
    valid = [text for text, error in zip(texts, errors) if error is None]
    counts = collections.Counter(map(source.mode, valid))
    shares = {mode: (counts[mode] + chance) / (len(valid) + 1) for mode, chance in modes.items()}
    return {
        "valid": len(valid) / len(texts),
        "coverage": sum(chance * math.log(chance / shares[mode]) for mode, chance in modes.items()),
        "until_error": statistics.fmean(len(text) if e is None else e for text, e in zip(texts, errors)),
    }
