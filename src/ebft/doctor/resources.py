"""Whether the memory of the device and the space on the disk suffice for a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ebft.config.schema import RunConfig
from ebft.doctor.check import Check
from ebft.doctor.estimate import Estimate, available_memory, estimate, free_disk
from ebft.doctor.rows import forward_tokens, longest_rows
from ebft.doctor.step import savings
from ebft.run.arguments import planned_steps
from ebft.run.training import this_machine

_GIB = 2**30


def estimated(config: RunConfig, model_config: Any, rows: Any) -> Estimate:
    return estimate(config, model_config, forward_tokens(config, longest_rows(config, rows)))


def exceeds(needed: Estimate) -> bool:
    free, _ = available_memory()
    return free is not None and needed.fixed > free


def memory_checks(config: RunConfig, needed: Estimate) -> Iterator[Check]:
    free, where = available_memory()
    parts = {
        "weights": needed.weights,
        "feature network": needed.features,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
        "activations (rough)": needed.activations,
    }
    shown = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    text = f"estimated {gib(needed.total)}: {shown}; {needed.trained:,} of {needed.parameters:,} weights are trained"
    if free is None:
        yield Check("ok", "memory", text)
        return
    text += f". {gib(free)} are free on {where}"
    if exceeds(needed):
        yield Check("error", "memory", f"{text}. To lower it: {'; '.join(savings(config))}.")
    elif needed.total > 0.9 * free:
        yield Check("warning", "memory", f"{text}. To lower it: {'; '.join(savings(config))}.")
    else:
        yield Check("ok", "memory", text)


def disk_check(config: RunConfig, needed: Estimate, rows: int) -> Check:
    count = _checkpoints(config, rows)
    total = needed.checkpoint * count + needed.checkpoint
    free, existing = free_disk(config.output_dir)
    kept = f"{count} checkpoint{'' if count == 1 else 's'}"
    text = f"about {gib(total)} for {kept} and the model; {gib(free)} are free in {existing}"
    if total > free:
        remedy = "Set save_total_limit, save_only_model: true, a larger save_steps, or an output_dir on another disk."
        return Check("error", "disk", f"{text}. {remedy}")
    return Check("ok", "disk", text)


def _checkpoints(config: RunConfig, rows: int) -> int:
    """Number of checkpoints that are on the disk at the same time."""
    machine = this_machine()
    steps = planned_steps(config, machine, rows)
    per_epoch = config.method.steps_per_epoch(config, machine, rows)
    every = config.save_steps
    if config.saves_per_epoch is not None:
        every = max(1, per_epoch // config.saves_per_epoch)
    if config.save_strategy == "no":
        return 0
    if every is None or config.save_strategy == "epoch":
        every = per_epoch
    elif every < 1:  # a fraction of the steps
        every = max(1, round(every * steps))
    count = max(1, -(-steps // int(every)))
    # The oldest one is deleted after the newest one is saved.
    return count if config.save_total_limit is None else min(count, config.save_total_limit + 1)


def gib(size: float) -> str:
    if size < _GIB:
        return f"{size / 2**20:.0f} MiB"
    return f"{size / _GIB:.1f} GiB" if size < 10 * _GIB else f"{size / _GIB:.0f} GiB"
