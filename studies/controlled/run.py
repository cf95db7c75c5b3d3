"""Methods beside each other on texts whose distribution is known, for the same FLOPs: README.md has the commands."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the order of sums depends on their number
sys.path.extend(str(folder) for folder in (Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from cells import CELLS, HERE, OUTPUT, SIZES, WARM, Cell  # noqa: E402
from measure import measured  # noqa: E402
from sources import BEFORE, FEW, SOURCES, Source  # noqa: E402

from benchmarks.measuring import machine  # noqa: E402
from ebft import evaluate, load_config, train  # noqa: E402
from ebft.examples.quickstart.brackets import draw, save_random_model, write_texts  # noqa: E402

RESULTS, TEXTS, HELD_OUT = HERE / "results", 60_000, 600


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="only runs of these names")
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no further run after so many hours")
    parser.add_argument("--list", action="store_true", help="only list the runs")
    arguments = parser.parse_args()
    started = time.perf_counter()
    for cell in CELLS:
        path = RESULTS / f"{cell.name}.json"
        if not any(fnmatch(cell.name, pattern) for pattern in arguments.only):
            continue
        if arguments.list:
            print("done" if path.exists() else "    ", cell.name, sep="  ")
        elif not path.exists() and time.perf_counter() - started < arguments.hours * 3600:
            write(path, result_of(cell))
            print(path, flush=True)


def result_of(cell: Cell) -> dict[str, Any]:
    """Train and measure a cell."""
    source, began = SOURCES[cell.source](), time.perf_counter()
    started = json.loads(start(cell, source).read_text(encoding="utf-8"))
    if cell.method == "start":
        cost, overrides = started, []
    else:
        texts = cell.folder / f"train{cell.seed}.jsonl"
        if not texts.exists():
            write_texts(texts, draw(source, 10_000 + cell.seed, FEW.get(cell.source, TEXTS)), source=cell.source)
        if cell.setting == "large_features":
            start(replace(cell, size="large"), source)
        overrides = cell.overrides(started["flops"] / started["steps"] / 2)  # 32 texts a step instead of 64
        cost = trained(cell.method, overrides)
    trained_in = time.perf_counter() - began
    found = measured(source, str(cell.model)) | feature_matching(cell, source)
    if cell.method != "start":
        shutil.rmtree(cell.model)
    found["seconds"] = {"train": trained_in, "measure": time.perf_counter() - began - trained_in}
    shown = [override.replace(f"{OUTPUT}/", "") for override in overrides]
    return {"cell": cell.__dict__, "overrides": shown, "cost": cost, **found, "machine": machine(torch.device("cpu"))}


def start(cell: Cell, source: Source) -> Path:
    """The warm start, trained from scratch on fresh texts unless it is there: the file of its cost."""
    done = cell.folder / "start.json"
    if not done.exists():
        cell.folder.mkdir(parents=True, exist_ok=True)
        steps, rate = WARM[cell.size]
        learned = BEFORE.get(cell.source, SOURCES[cell.source])()
        write_texts(cell.folder / "warm.jsonl", draw(learned, 1, 64 * steps), source=cell.source)
        save_random_model(cell.folder / "base", source.words, SIZES[cell.size])
        overrides = [f"base_model={cell.folder / 'base'}", f"datasets.0.path={cell.folder / 'warm.jsonl'}"]
        overrides += [f"output_dir={cell.folder / 'start'}", f"max_steps={steps}", f"learning_rate={rate}"]
        cost = trained("sft", [*overrides, "micro_batch_size=64", "lr_scheduler=cosine", "warmup_steps=100"])
        write(done, cost)
    return done


def trained(method: str, overrides: list[str]) -> dict[str, float]:
    """Train by the config of a method: what that cost."""
    result = train(load_config(HERE / "configs" / f"{method}.yaml", overrides))
    cost = {name: result.metrics[f"budget/{name}"] for name in ("documents", "generated_tokens", "flops")}
    return {**cost, "steps": result.trainer.state.global_step}


def feature_matching(cell: Cell, source: Source) -> dict[str, Any]:
    """The CFM loss of blocks of held-out texts in the start's features, less the start's, with its interval."""
    texts, start = cell.folder / "test.jsonl", cell.folder / "start"
    write_texts(texts, draw(source, 2, HELD_OUT), source=cell.source)
    overrides = [f"base_model={start}", f"datasets.0.path={cell.folder / 'warm.jsonl'}", f"output_dir={cell.model}"]
    overrides += [f"test_datasets=[{json.dumps({'path': str(texts), 'type': 'ebft_strided_structured.transform'})}]"]
    found = evaluate(load_config(HERE / "configs" / "ebft.yaml", overrides), [str(start), str(cell.model)]).models[-1]
    differences = (found.differences, found.difference_intervals) if cell.method != "start" else ({}, {})
    change, interval = (found.get("cfm_loss") for found in differences)
    return {"cfm_loss": found.metrics["cfm_loss"], "cfm_loss_change": change, "cfm_loss_interval": interval}


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all, with six digits of each number."""
    text = json.dumps(json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.6g}")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(text + "\n", encoding="utf-8")
    os.replace(path.with_suffix(".new"), path)


if __name__ == "__main__":
    main()
