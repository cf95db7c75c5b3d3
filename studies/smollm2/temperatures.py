"""Full completions of trained models sampled at several temperatures: quality beside how much the samples differ.

    python studies/smollm2/temperatures.py --model MODEL ...  # folders of outputs/study/smollm2/models

The study samples at temperature 1. A model whose samples are more alike scores higher there for that reason alone, and
any model does so at a lower temperature. This compares models at equal difference of their samples. The documents,
prompts and judges are those of the study. About a minute for each model and temperature on a CPU core. Writes
results/temperatures-TASK.json, and prints it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import measure
import sampling
import stored
from options import parsed, scale_and_place, study_options
from rows import read_rows
from run_cell import machine_card
from scale import Scale
from settings import Place

from ebft.tools.quickstart.run import console

TEMPERATURES = (1.0, 0.9, 0.8, 0.7)
OF_ONE_SAMPLE = "_greedy"  # not of samples, so not measured here


def main() -> None:
    """Measure every model at every temperature, print and store."""
    arguments = read_arguments()
    scale, place = scale_and_place(arguments)
    found: dict[str, dict[float, dict[str, float]]] = {}
    for model in arguments.model:
        name = Path(model).name
        found[name] = by_temperature(model, place, scale, arguments.task, arguments.temperatures)
        for temperature, values in found[name].items():
            shown = "  ".join(f"{metric} {value:.4f}" for metric, value in values.items())
            console.print(f"{name}  T = {temperature:g}  {shown}", highlight=False)
    file = arguments.results / f"temperatures-{arguments.task}.json"
    stored.write_json(file, stored.rounded({"task": arguments.task, "machine": machine_card(), "models": found}))
    console.print(f"Stored: {file}")


def by_temperature(
    model: str, place: Place, scale: Scale, task: str, temperatures: list[float]
) -> dict[float, dict[str, float]]:
    """By temperature the mean of each metric of samples over the study's documents for full completions."""
    every = read_rows(place.data(task, "test"))
    rows = [every[number] for number in measure.evenly(list(range(len(every))), scale.sampling["documents"])]
    settings: dict[str, Any] = {"max_new_tokens": scale.sampling["max_new_tokens"]}
    sampler = sampling.Sampler(*measure.loaded(model, place), sampling.STOPS[task], **settings)
    prompts = [row["input"] for row in rows]
    drawn = {each: sampler.complete(prompts, scale.sampling["samples"], each) for each in temperatures}
    return {temperature: means(task, rows, texts) for temperature, texts in drawn.items()}


def means(task: str, rows: list[dict[str, Any]], drawn: list[list[str]]) -> dict[str, float]:
    """The means over rows of what the judges say of their samples, and of how these differ."""
    judged = measure.judged(task, rows, [texts[0] for texts in drawn], drawn)
    of_samples = {name: values for name, values in judged.items() if not name.endswith(OF_ONE_SAMPLE)}
    return {name: mean(values.values()) for name, values in (of_samples | measure.differing(drawn)).items()}


def read_arguments() -> argparse.Namespace:
    """Task, models, temperatures, and folders."""
    parser = study_options(__doc__)
    parser.add_argument("--task", choices=("functions", "translation"), default="translation")
    parser.add_argument("--model", nargs="+", required=True, help="folders of trained adapters, or a pretrained model")
    parser.add_argument("--temperatures", nargs="+", type=float, default=list(TEMPERATURES), metavar="T")
    return parsed(parser)


if __name__ == "__main__":
    main()
