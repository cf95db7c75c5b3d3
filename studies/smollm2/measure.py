"""Measures a model: on short and on long rollouts in the base model's feature space, and by full completions.

All of it is on documents of the model's task that nothing was trained on. A measurement is {"metrics": means,
"per_document": {metric: {"document", "sum", "weight"}}, ...}, and per_document as in `ebft evaluate`'s JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sampling
import settings
import translation
import verifiers
from cells import Cell
from rows import read_rows
from scale import Scale
from settings import Place

CURVES = ("cfm_loss", "rollout_nll_base")
# By task the judges of full completions; each applies to the rows that it can judge.
JUDGES = {
    "functions": {
        "parses": verifiers.parses,
        "substance": verifiers.substance,
        "passes_doctest": verifiers.passes_doctest,
    },
    "translation": {"chrf": translation.chrf},
}
SHOWN = 3  # documents whose completions are kept for the report
Measured = dict[str, Any]


def features(model: str, place: Place, scale: Scale, cell: Cell, part: str) -> Measured:
    """Cross-entropy and feature matching on a part of the data of the cell's task, with the curves of CURVES."""
    from ebft import evaluate, load_config

    config = load_config(settings.config_file("evaluation"), settings.evaluation_overrides(place, scale, cell, part))
    found = evaluate(config, models=[model]).to_dict()["models"][0]
    curves = {name: [[point["x"], point["value"]] for point in found["curves"][name]] for name in CURVES}
    return {"metrics": found["metrics"], "per_document": found["per_document"], "rollouts": curves}


def completions(model: str, place: Place, scale: Scale, cell: Cell, part: str) -> Measured:
    """What the judges say of greedy completions and of samples at temperature 1, and how the samples differ."""
    task = cell.task
    every = read_rows(place.data(task, part))
    numbers = evenly(list(range(len(every))), scale.sampling["documents"])
    rows = [every[number] for number in numbers]
    samples = scale.sampling["samples"]
    sampler = sampling.Sampler(
        *loaded(model, place, settings.precision(cell)),
        sampling.STOPS[task],
        max_new_tokens=scale.sampling["max_new_tokens"],
    )
    prompts = [row["input"] for row in rows]
    best = [texts[0] for texts in sampler.complete(prompts, 1, 0.0)]
    drawn = sampler.complete(prompts, samples, 1.0)
    values = judged(task, rows, best, drawn) | differing(drawn)
    found = {"metrics": {}, "per_document": {}}
    for name, of_row in values.items():
        add(found, name, {numbers[row]: value for row, value in of_row.items()})
    if task == "translation":
        found["metrics"] |= corpus_metrics(rows, best, drawn)
    # Evenly spread over the documents, which are in the order of their length.
    shown = evenly(list(range(len(rows))), SHOWN)
    found["shown"] = [
        {"input": rows[n]["input"], "output": rows[n]["output"], "greedy": best[n], "sample": drawn[n][0]}
        for n in shown
    ]
    return found


def judged(
    task: str, rows: list[dict[str, Any]], best: list[str], drawn: list[list[str]]
) -> dict[str, dict[int, float]]:
    """By metric the value of each row that it applies to: NAME_greedy, NAME_pass@1 (the mean) and NAME_pass@N."""
    found: dict[str, dict[int, float]] = {}
    for name, judge in JUDGES[task].items():
        for number, row in enumerate(rows):
            values = [judge(row["input"], [text], row) for text in (best[number], *drawn[number])]
            if None in values:
                continue
            samples = values[1:]
            found.setdefault(f"{name}_greedy", {})[number] = values[0]
            found.setdefault(f"{name}_pass@1", {})[number] = sum(samples) / len(samples)
            found.setdefault(f"{name}_pass@N", {})[number] = max(samples)
    return found


def differing(drawn: list[list[str]]) -> dict[str, dict[int, float]]:
    """By metric how the samples of each row differ from each other."""
    found: dict[str, dict[int, float]] = {}
    for number, texts in enumerate(drawn):
        for name, value in translation.spread(texts).items():
            found.setdefault(name, {})[number] = value
    return found


def corpus_metrics(rows: list[dict[str, Any]], best: list[str], drawn: list[list[str]]) -> dict[str, float]:
    """Corpus BLEU and chrF of the greedy translations, and their means over the samples."""
    references = [translation.line(row["output"]) for row in rows]
    scores = lambda texts: translation.corpus_scores([translation.line(text) for text in texts], references)
    of_samples = [scores(texts) for texts in zip(*drawn)]
    mean = {name: sum(one[name] for one in of_samples) / len(of_samples) for name in of_samples[0]}
    greedy = {f"{name}_greedy": value for name, value in scores(best).items()}
    return greedy | {f"{name}_pass@1": value for name, value in mean.items()}


def loaded(model: str, place: Place, overrides: Sequence[str] = ()) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer; adapters on their base. `overrides` are of evaluation.yaml."""
    from ebft import load_config
    from ebft.models.tokenizer import load_tokenizer
    from ebft.tools.evaluation.models import load_subject

    config = load_config(settings.config_file("evaluation"), [f"base_model={place.base_model}", *overrides])
    tokenizer = load_tokenizer(config)
    return load_subject(config, model, tokenizer).policy, tokenizer


def add(found: Measured, name: str, values: dict[int, float]) -> None:
    """Add a metric that is the mean of a value for each document."""
    numbers = list(values.values())
    found["per_document"][name] = {"document": list(values), "sum": numbers, "weight": [1.0] * len(numbers)}
    found["metrics"][name] = sum(numbers) / len(numbers)


def evenly(rows: list[Any], count: int) -> list[Any]:
    """`count` of the rows, or all where there are fewer, with equal gaps."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]
