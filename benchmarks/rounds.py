"""Rounds of both trainers in turn at one document length, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.flops import counted_flops, needed_flops
from benchmarks.measuring import GemmRate, peak_flops, with_peak_memory
from benchmarks.presets import Preset, document, num_blocks, num_generated
from benchmarks.sides import PHASES, Side

SLOW = 20.0  # seconds of a step that is timed once, however many rounds were asked for


@dataclass
class Rounds:
    """One side at one length: first a step for warming up and for memory, then timed ones."""

    side: Side
    inputs: dict[str, Tensor]
    timed: list[dict[str, float]] = field(default_factory=list)
    peak_mib: float | None = None
    failed: str | None = None
    is_slow: bool = False

    def warm_up(self) -> None:
        """Not timed: taking memory afresh from the system, as its measurement needs, costs some percent of a step."""
        seconds, self.peak_mib = with_peak_memory(self._step, self.side.device)
        self.is_slow = seconds.get("step", 0.0) > SLOW

    def time_one(self) -> None:
        """One timed step after one that takes the memory, unless the side failed, or is slow and was timed before."""
        if not self.failed and not (self.is_slow and self.timed):
            if not self.is_slow:
                self._step()
            seconds = self._step()
            self.timed += [seconds] if seconds else []

    def _step(self) -> dict[str, float]:
        """The seconds of a step; none for a published trainer that fails, since where it does is a result too."""
        try:
            return self.side.timed_step(self.inputs)
        except Exception as error:
            if self.side.is_ours:
                raise
            self.failed = f"{type(error).__name__}: {error}".splitlines()[0]
            self.side.trainer.model.zero_grad(set_to_none=True)
            return {}


def measure(preset: Preset, length: int, sides: list[Side], repeats: int) -> dict[str, Any]:
    """Everything about one length, with a row for each side. The first side is ours."""
    device = sides[0].device
    inputs = document(preset, length, device)
    rates = {side.dtype: GemmRate(side.dtype, device) for side in sides}
    all_rounds = [Rounds(side, inputs) for side in sides]
    for rounds in all_rounds:
        rounds.warm_up()
    for _ in range(repeats):
        for rate in rates.values():
            rate.sample()
        for rounds in all_rounds:
            rounds.time_one()
    for rate in rates.values():
        rate.sample()
    flop_rates = {dtype: rate.median() for dtype, rate in rates.items()}
    needed = needed_flops(sides[0].trainer.model, length)
    return {
        "length": length,
        "blocks": num_blocks(length),
        "generated": num_generated(length),
        "needed_gflop": {phase: flop / 1e9 for phase, flop in needed.items()},
        "gemm_gflops": {_name(dtype): rate / 1e9 for dtype, rate in flop_rates.items()},
        "sides": {
            rounds.side.name: _row(rounds, length, sum(needed.values()), flop_rates[rounds.side.dtype])
            for rounds in all_rounds
        },
    }


def _row(rounds: Rounds, length: int, needed: int, flop_rate: float) -> dict[str, Any]:
    """The median round of a side, its throughput and, for ours, the floor."""
    side, timed = rounds.side, sorted(rounds.timed, key=lambda seconds: seconds["step"])
    row = {"dtype": _name(side.dtype), "rounds": len(timed), "failed": rounds.failed, "peak_mib": rounds.peak_mib}
    if not timed:
        return row
    median = timed[(len(timed) - 1) // 2]
    peak = peak_flops(side.device)
    row |= {phase: median[phase] for phase in (*PHASES, "step")}
    row |= {"fastest": timed[0]["step"], "slowest": timed[-1]["step"]}
    row["tokens_per_s"] = (length + num_generated(length)) / row["step"]
    row["mfu"] = needed / row["step"] / (peak[0] if peak else flop_rate)
    if side.is_ours and not side.is_compiled:  # the counter sees no products inside compiled kernels
        counted = counted_flops(lambda: side.step(rounds.inputs))
        floor = counted / flop_rate
        row |= {"counted_gflop": counted / 1e9, "floor": floor, "step_over_floor": row["step"] / floor}
    return row


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
