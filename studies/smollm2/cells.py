"""The study's runs on translations, and from a run to its config: YAML files of configs/ and overrides, nothing else.

Runs on functions and raw text read other versions of packages than today's: README.md has their command.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.extend(str(folder) for folder in (HERE, HERE.parents[1]) if str(folder) not in sys.path)

# Settings of EBFT: what each changes in configs/ebft.yaml, whose settings are the paper's. `mean` was chosen by hand.
MEAN = ("ebft.embed_method=mean_pooling", "ebft.whitening_space=feature", "ebft.temperature=1.0", "ebft.ce_coef=0.2")
SETTINGS = {"mean": MEAN, "paper": (), "mean ce 0": (*MEAN, "ebft.ce_coef=0")}
RATE = 1e-3  # of SFT and of EBFT's settings `mean`, the best of a sweep; others have the rate of their config

# Start, methods (of EBFT with the setting), seeds: the methods of a line run with its first seed, then the next.
PLAN = (
    ("base", ("none",), (0,)),
    ("base", ("sft", "ebft mean", "structured"), (0, 1, 2)),
    ("base", ("sft_flops",), (2,)),
    ("base", ("sdft",), (0,)),
    ("warm", ("none",), (0,)),
    ("warm", ("sft", "ebft mean"), (0, 1)),
    ("base", ("ebft paper", "ebft mean ce 0"), (0,)),
)
# In float32: runs planned for processors without bfloat16 instructions, where bfloat16 takes ten times as long.
FLOAT32 = ("*-warm-*", "*-sft_flops-*", "*-sdft-*", "*-ebft-paper-*")
LINE = "trl.generation_kwargs.stop_token_ids=[198]"  # a line break, with which translations end
WARM_STEPS = 60
STEPS = {"warm": WARM_STEPS, "structured": 50}  # by start or method; 200 elsewhere
ROWS, TINY_ROWS = (3240, 970, 200, 200, 48), (12, 4, 4, 4, 2)
TINY = ("micro_batch_size=2", "gradient_accumulation_steps=1", "warmup_steps=1", "logging_steps=1", "save_steps=1")
TINY_COMPLETIONS = ("micro_batch_size=4", "trl.num_generations=2", "trl.max_completion_length=8")


@dataclass(frozen=True)
class Cell:
    """One model to train and measure. Method `none` is the start itself, `sft_flops` is SFT with the FLOPs of EBFT."""

    task: str
    start: str  # base, or warm: SFT on rows that nothing else is trained on
    method: str  # none, sft, sft_flops, sdft, ebft, structured (EBFT on whole completions, over vLLM)
    seed: int = 0
    setting: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The name that its seeds share."""
        parts = (self.task, self.start, self.method, self.setting.replace(" ", "_"))
        return "-".join(part for part in parts if part)

    @property
    def name(self) -> str:
        """A file name of its own."""
        return f"{self.group}-seed{self.seed}"


def planned(start: str, method: str, seed: int) -> Cell:
    """The cell of a method as the plan names it."""
    name, _, setting = method.partition(" ")
    return Cell("translation", start, name, seed, setting, SETTINGS.get(setting, ()))


CELLS = [planned(start, name, seed) for start, names, seeds in PLAN for seed in seeds for name in names]


@dataclass(frozen=True)
class Study:
    """How large the study is, and where its files are."""

    output: Path
    results: Path
    base_model: str  # a folder, or a name that configs know
    is_tiny: bool
    ends: bool = False  # evaluations have rollouts that end with their text

    def data(self, part: str) -> Path:
        """A part of the data: train, warm, validation, test or long."""
        return self.output / "data" / f"translation_{part}.jsonl"

    def start(self, cell: Cell) -> str:
        """What a cell's training starts from."""
        return self.base_model if cell.start == "base" else str(self.output / "warm-translation")

    def model(self, cell: Cell) -> str:
        """What a cell measures: the folder of its adapter, or the start."""
        return self.start(cell) if cell.method == "none" else str(self.output / "models" / cell.name)

    def training(self, cell: Cell, steps: int, flops: float | None = None) -> list[str]:
        """Overrides of the config of a cell's method; `flops` ends its run."""
        method = config_file(cell.method).stem
        found = [*self._data(cell, "train"), f"output_dir={self.model(cell)}", f"max_steps={steps}"]
        found += [f"lora_model_dir={self.start(cell)}"] if cell.start == "warm" else []
        if method == "structured" and "EBFT_VLLM_PYTHON" in os.environ:
            found += [f"vllm.python={os.environ['EBFT_VLLM_PYTHON']}"]
        found += [f"learning_rate={RATE:g}"] if method == "sft" or cell.setting.startswith("mean") else []
        found += [] if flops is None else [f"budget.flops={flops}"]
        found += [LINE] if method == "sdft" else []
        if self.is_tiny:
            found += [*TINY, *(TINY_COMPLETIONS if method in ("sdft", "structured") else ())]
            found += ["trl.use_vllm=false", "trl.async_prefetch=false"] if method == "structured" else []
        return [*found, *cell.overrides, f"seed={cell.seed}"]

    def warm(self) -> list[str]:
        """Overrides of sft.yaml for the warm start."""
        cell = Cell("translation", "warm", "sft")
        found = [*self._data(cell, "warm"), f"output_dir={self.start(cell)}"]
        return [*found, *(TINY if self.is_tiny else ()), f"max_steps={2 if self.is_tiny else WARM_STEPS}"]

    def evaluation(self, cell: Cell, part: str) -> list[str]:
        """Overrides of evaluation.yaml for a part of the data: `long` has one long rollout of each document."""
        found = [*self._data(cell, "train"), f"test_datasets.0.path={self.data(part)}"]
        found += [f"output_dir={self.output / 'evaluation'}", *(["micro_batch_size=4"] if self.is_tiny else [])]
        found += ["ebft.stop_at_end=true"] if self.ends else []
        length = 16 if self.is_tiny else 64
        return [*found, *([f"ebft.generate_max_len={length}", "ebft.stride=100000"] if part == "long" else [])]

    def _data(self, cell: Cell, part: str) -> list[str]:
        is_float32 = any(fnmatch(cell.name, pattern) for pattern in FLOAT32)
        precision = ["torch_dtype=float32"] if is_float32 else []
        return [f"base_model={self.base_model}", f"datasets.0.path={self.data(part)}", *precision]


def config_file(method: str) -> Path:
    """The YAML file of a method; `evaluation` is the file of measurements."""
    return HERE / "configs" / f"{method.removesuffix('_flops')}.yaml"


def length_of(cell: Cell, study: Study) -> tuple[int, float | None]:
    """Steps of a cell, and the FLOPs that end it. Raises ValueError where results that say them are missing."""
    steps = 2 if study.is_tiny else STEPS.get(cell.start, STEPS.get(cell.method, 200))
    if cell.method not in ("sft_flops", "sdft"):
        return steps, None
    costs = []
    for other in (replace(cell, method="sft"), planned(cell.start, "ebft mean", cell.seed)):
        path = study.results / "cells" / f"{other.name}.json"
        if not path.exists():
            raise ValueError(f"its length follows from the FLOPs of {other.name}: run this first")
        costs.append(json.loads(path.read_text(encoding="utf-8"))["cost"])
    sft, ebft = costs
    if cell.method == "sdft":
        return steps, ebft["flops"]
    return round(ebft["flops"] / (sft["flops"] / sft["steps"])), None


def parser_of(document: str) -> argparse.ArgumentParser:
    """A parser of scale, pretrained model and folders; `document` is the module's docstring."""
    parser = argparse.ArgumentParser(description=document.split("\n")[0])
    parser.add_argument("--scale", choices=("smollm2", "tiny"), default="smollm2", help="tiny: a random model")
    parser.add_argument("--model", "--base-model", help="folder of the pretrained model (default: as fetched)")
    parser.add_argument("--output", type=Path, help="folder of data and models (default outputs/study/SCALE)")
    parser.add_argument("--results", type=Path, help="folder of results (default: the study's own)")
    return parser


def study_of(arguments: argparse.Namespace) -> Study:
    """The study that the parsed options name; at another scale than its own, it has results of its own."""
    is_tiny = arguments.scale == "tiny"
    output = (arguments.output or Path("outputs/study") / arguments.scale).resolve()
    results = arguments.results or (output / "results" if is_tiny else HERE / "results")
    return Study(output, results, arguments.model or (str(output / "base") if is_tiny else "smollm2-135m"), is_tiny)
