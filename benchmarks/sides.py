"""One trainer ready to step: ours or the published one, and the functions inside its step that are its phases."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

import ebft.strided.trainer
from benchmarks import published
from benchmarks.measuring import stopwatch, timed
from benchmarks.presets import OPTIONS, Preset, build_model
from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer

PHASES = ("rollout", "features", "forward", "backward")


@dataclass
class Side:
    """A trainer whose steps are timed by phase; `watched`: functions of rollout and features; the rest is forward."""

    name: str
    dtype: torch.dtype
    trainer: Trainer
    watched: dict[str, tuple[Any, str]]
    is_ours: bool

    def __post_init__(self):
        model = self.trainer.model
        # What Trainer.train does before its first step: under bf16 the forward pass runs in autocast.
        self.trainer.accelerator.prepare_model(model)
        model.train()

    @property
    def is_compiled(self) -> bool:
        """Whether its attention is a kernel that torch.compile made."""
        return self.device.type == "cuda" and self.trainer.model.config._attn_implementation == "flex_attention"

    @property
    def device(self) -> torch.device:
        return next(self.trainer.model.parameters()).device

    def step(self, inputs: dict[str, Tensor]) -> None:
        """Loss and gradients of one batch, from no gradients to no gradients."""
        self.trainer.compute_loss(self.trainer.model, inputs).backward()
        self.trainer.model.zero_grad(set_to_none=True)

    def timed_step(self, inputs: dict[str, Tensor]) -> dict[str, float]:
        """Seconds of the same by phase, and their sum as `step`."""
        model, device = self.trainer.model, self.device
        seconds: dict[str, float] = {}
        with ExitStack() as watching:
            for phase, (owner, function) in self.watched.items():
                watching.enter_context(stopwatch(owner, function, phase, seconds, device))
            loss, whole = timed(lambda: self.trainer.compute_loss(model, inputs), device)
        seconds["forward"] = whole - sum(seconds.values())
        _, seconds["backward"] = timed(loss.backward, device)
        model.zero_grad(set_to_none=True)
        return {**seconds, "step": sum(seconds.values())}


def ours(
    preset: Preset,
    dtype: str,
    positions: int,
    folder: Path,
    name: str = "ours",
    attention: str | None = None,
    lora_rank: int | None = None,
    is_mixed: bool | None = None,
    **passes: bool | None,
) -> Side:
    """Our trainer around the model; `is_mixed`: mixed precision, which bfloat16 weights have unless told otherwise.

    passes: options of the trainer, such as `single_pass`.
    """
    preset = preset if lora_rank is None else replace(preset, lora_rank=lora_rank)
    arguments = _arguments(folder, dtype)
    arguments["bf16"] = arguments["bf16"] if is_mixed is None else is_mixed
    args = StridedEBFTConfig(**arguments, **copy.deepcopy(OPTIONS), **passes)
    model = build_model(preset, getattr(torch, dtype), positions, attention)
    trainer = StridedEBFTTrainer(model=model, args=args)
    watched = {"rollout": (ebft.strided.trainer, "sample_rollouts"), "features": (ebft.strided.trainer, "embed_blocks")}
    return Side(name, model.dtype, trainer, watched, is_ours=True)


def theirs(preset: Preset, dtype: str, positions: int, folder: Path, trainer_class: type[Trainer]) -> Side:
    """The published trainer around a model with the same weights. Its feature phase includes the rewards."""
    model = build_model(preset, getattr(torch, dtype), positions)
    trainer = published.build_trainer(trainer_class, model, TrainingArguments(**_arguments(folder, dtype)))
    watched = {"rollout": (trainer, "_generate_strided_blocks"), "features": (trainer, "_compute_block_rewards")}
    return Side("axolotl", model.dtype, trainer, watched, is_ours=False)


def _arguments(folder: Path, dtype: str) -> dict[str, Any]:
    machine = {"use_cpu": not torch.cuda.is_available(), "bf16": dtype == "bfloat16"}
    return {"output_dir": str(folder), "report_to": [], **machine}
