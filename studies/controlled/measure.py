"""Measures a model against the source of its texts, with the metrics of README.md."""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft.examples.quickstart.brackets import Source, draw, first_error, ids_of, kl, sampled
from ebft.features import FeatureNetwork

TEMPERATURES = (0.6, 0.8, 0.9, 1.0, 1.1)
TEXTS, SAMPLES = 1000, 1000


def measured(source: Source, folder: str) -> dict[str, Any]:
    """Metrics of the model in `folder`: means, and of each temperature."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = ids_of(AutoTokenizer.from_pretrained(folder), source)
    divergences = kl(model, ids, source, draw(source, 999, TEXTS), TEMPERATURES)
    modes = true_modes(source)
    found = {}
    for temperature in TEMPERATURES:
        texts = sampled(model, ids, SAMPLES, temperature)
        found[str(temperature)] = {"kl": statistics.fmean(divergences[temperature]), **judged(source, texts, modes)}
    errors = {"kl": statistics.stdev(divergences[1.0]) / TEXTS**0.5, "valid": 0.5 / SAMPLES**0.5}
    return {"temperatures": found, "standard_errors": errors, **found["1.0"]}


class LargeFeatures:
    """A plugin: rewards have the features of the large model's start, and not of the policy's own."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        network = AutoModelForCausalLM.from_pretrained(cfg.base_model.replace("-small", "-large"), dtype=torch.float32)
        options = trainer.args.feature_layers, trainer.args.embed_method
        trainer.feature_network = FeatureNetwork(trainer.model, *options, network=network)


def true_modes(source: Source) -> dict[Any, float]:
    """The probability of each mode, from 50,000 texts."""
    texts = draw(source, 1234, 50_000)
    return {mode: count / len(texts) for mode, count in collections.Counter(map(source.mode, texts)).items()}


def judged(source: Source, texts: list[list[str]], modes: dict[Any, float]) -> dict[str, float]:
    """Validity, coverage and words until the first error of samples. Coverage is KL(true modes || sampled modes), with
    one sample more that is spread like the true modes."""
    errors = [first_error(source, text) for text in texts]
    valid = [text for text, error in zip(texts, errors) if error is None]
    counts = collections.Counter(map(source.mode, valid))
    shares = {mode: (counts[mode] + chance) / (len(valid) + 1) for mode, chance in modes.items()}
    return {
        "valid": len(valid) / len(texts),
        "coverage": sum(chance * math.log(chance / shares[mode]) for mode, chance in modes.items()),
        "until_error": statistics.fmean(len(text) if e is None else e for text, e in zip(texts, errors)),
    }
