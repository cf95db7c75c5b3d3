"""Whether the memory of the device and the space on the disk suffice for a run."""

from __future__ import annotations

from collections.abc import Iterator

from ebft.config.schema import RunConfig
from ebft.doctor.check import Check
from ebft.doctor.estimate import Estimate, Needs
from ebft.doctor.savings import advice
from ebft.machine import available_memory, gib
from ebft.run.rehearsal import checkpoints_kept, disk_need


def exceeds(needed: Estimate) -> bool:
    """Whether what follows from the number of weights is more than the free memory of its device."""
    free, _ = available_memory(needed.placed_on)
    return (free is not None and needed.fixed > free) or _copy_exceeds(needed)


def memory_checks(needs: Needs) -> Iterator[Check]:
    """Compare the estimate with the free memory of the model's device, and of the frozen copy's if it is another."""
    needed = needs.of(needs.config)
    free, where = available_memory(needed.placed_on)
    shown = ", ".join(f"{name} {gib(size)}" for name, size in needed.parts(needed.peak).items() if size)
    text = f"estimated {gib(needed.total)} at the peak, in {needed.peak}: {shown}"
    text += f"; {needed.trained:,} of {needed.parameters:,} weights are trained"
    text += f". {gib(free)} are free on {where}" if free is not None else ""
    if free is not None and needed.fixed > free:
        phase = "trainer setup" if needed.weights + needed.copy > free else "optimizer"
        yield Check("error", "memory", f"{text}.{advice(needs, phase)}")
    elif free is not None and needed.total > 0.9 * free:
        yield Check("warning", "memory", f"{text}.{advice(needs, needed.peak)}")
    else:
        yield Check("ok", "memory", text)
    if needed.features_on is not None:
        yield _copy_check(needed)


def _copy_check(needed: Estimate) -> Check:
    free, where = available_memory(needed.features_on)
    text = f"{gib(needed.features)} for the frozen copy of the model on {needed.features_on}"
    text += f"; {gib(free)} are free on {where}" if free is not None else ""
    if _copy_exceeds(needed):
        remedy = "Set ebft.feature_device to cpu or to another GPU, or adapter: lora, which needs no copy."
        return Check("error", "feature network", f"{text}. {remedy}")
    return Check("ok", "feature network", text)


def _copy_exceeds(needed: Estimate) -> bool:
    free = available_memory(needed.features_on)[0] if needed.features_on is not None else None
    return free is not None and needed.features > free


def disk_check(config: RunConfig, needed: Estimate, rows: int) -> Check:
    problem, text = disk_need(config, needed.gradients, needed.checkpoint, checkpoints_kept(config, rows))
    return Check("ok" if problem is None else "error", "disk", text if problem is None else problem)
