"""The study's runs, its plan, and from a run to its config: a YAML file of configs/ and overrides, nothing else."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parents[1] / "outputs" / "study" / "controlled"

# Llama models: too small for the texts, and large enough.
SIZES = {
    "small": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
    "large": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
}
WARM = {"small": (2000, 3e-3), "large": (5000, 1e-3)}  # steps of 64 texts from scratch, and rate; it decays to 0
BUDGET = {"small": 1e12, "large": 8e12}  # FLOPs of every run, except that RLVR has at most 400 steps
RATES = {"small": 3e-4, "large": 1e-4}  # of EBFT and RLVR where nothing else is said; SFT has ten times as much

# Settings: what each changes in its method's config.
EBFT = {
    "": (),
    "ce_0.03": ("ebft.ce_coef=0.03",),
    "ce_0.2": ("ebft.ce_coef=0.2",),
    "ce_1": ("ebft.ce_coef=1",),
    "samples_4": ("ebft.n_samples_per_prompt=4",),
    "samples_32": ("ebft.n_samples_per_prompt=32",),
    "diversity_0.5": ("ebft.diversity_coef=0.5",),
    "whitened": ("ebft.use_whitening=true", "ebft.whitening_space=feature"),
    "blocks_of_2": ("ebft.generate_max_len=2", "ebft.stride=2"),
    "batch_128": ("gradient_accumulation_steps=4",),
    "large_features": ("plugins=[measure.LargeFeatures]",),
    "last_token": ("ebft.embed_method=last_token",),
    "lora": ("adapter=lora", "lora_r=8", "lora_alpha=16", "lora_target_linear=true"),
    "decay": ("lr_scheduler=cosine", "max_steps=136"),
    "long": ("budget.flops=1e13",),
}


@dataclass(frozen=True)
class Cell:
    """One run from a source's warm start; `start` is the warm start itself."""

    source: str
    size: str
    method: str  # start, sft, ebft, structured or rlvr
    setting: str = ""
    rate: float = 1.0  # as a multiple of RATES
    seed: int = 0

    @property
    def group(self) -> str:
        """The name that its seeds share."""
        rate = "" if self.rate == 1 else f"rate{self.rate:g}"
        return "-".join(filter(None, (self.source, self.size, self.method, self.setting, rate)))

    @property
    def name(self) -> str:
        """A file name of its own."""
        return f"{self.group}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        """Where the texts and the start of its source and size are."""
        return OUTPUT / f"{self.source}-{self.size}"

    @property
    def model(self) -> Path:
        """What it measures."""
        return self.folder / ("start" if self.method == "start" else self.name)

    def overrides(self, flops_of_a_step: float) -> list[str]:
        """What it changes in its config; `flops_of_a_step` are those of SFT, whose rate can decay to its end."""
        rate = RATES[self.size] * self.rate * (10 if self.method == "sft" else 1)
        found = [f"base_model={self.folder / 'start'}", f"datasets.0.path={self.folder / f'train{self.seed}.jsonl'}"]
        found += [f"output_dir={self.model}", f"learning_rate={rate:g}", f"seed={self.seed}"]
        if self.setting == "tenth":
            return [*found, f"budget.flops={BUDGET[self.size] / 10}"]
        if self.method == "sft" and self.setting == "decay":
            return [*found, "lr_scheduler=cosine", f"max_steps={round(BUDGET[self.size] / flops_of_a_step)}"]
        return [*found, f"budget.flops={BUDGET[self.size]}", *EBFT[self.setting]]


# The runs of each source and size, written method:setting@rate; what answers most comes first.
USUAL = "sft sft:decay sft@0.1 ebft ebft:whitened ebft:ce_0.2 rlvr"
SINGLE = " ".join(["ebft@0.1 ebft@0.3 ebft@3 structured structured:ce_0.2", *map("ebft:{}".format, list(EBFT)[1:-2])])
PLAN = {
    "shifted-small": "sft sft@0.1 sft@0.01 ebft@0.3 ebft ebft@3 ebft@0.1 ebft:decay ebft:long@0.3 " + SINGLE,
    "moved-small": "sft:tenth sft:tenth@0.3 sft:tenth@0.1 ebft:ce_0.2 ebft:ce_1 ebft ebft@3 sft sft:decay sft@0.1",
    **dict.fromkeys(("traces-small", "brackets-small"), f"{USUAL} {SINGLE} ebft:large_features@0.3"),
    **dict.fromkeys(("sentences-small", "traces-large", "brackets-large", "sentences-large"), USUAL),
}


def planned() -> Iterator[Cell]:
    """All runs in their order, seed by seed."""
    for seed, (place, runs) in itertools.product(range(5), PLAN.items()):
        for run in ("start " * (seed == 0) + runs).split():
            method, setting, rate = re.fullmatch(r"(\w+):?([\w.]*)@?(.*)", run).groups()
            yield Cell(*place.split("-"), method, setting, float(rate or 1), seed)


CELLS = list(dict.fromkeys(planned()))
