"""Whether the memory of the device and the space on the disk suffice for a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ebft.config.schema import RunConfig
from ebft.doctor.check import Check
from ebft.doctor.estimate import Estimate, Needs
from ebft.doctor.free import available_memory, free_disk, total_memory
from ebft.doctor.rows import num_blocks, rows_per_step
from ebft.doctor.savings import advice, gib
from ebft.errors import ConfigError
from ebft.run.arguments import planned_steps
from ebft.run.building import this_machine


def exceeds(needed: Estimate) -> bool:
    """Whether what follows from the number of weights is more than the free memory of its device."""
    free, _ = available_memory(needed.placed_on)
    return (free is not None and needed.fixed > free) or _copy_exceeds(needed)


def check_step_fits(config: RunConfig, model_config: Any, data: Any) -> None:
    """Raise ConfigError if comparing the rollouts of one step needs more memory than the device has in all.

    Only what every run allocates at once counts: the features of all rollouts, and their products for diversity. The
    rows are those that the run cannot avoid, whatever their order. Costs nothing for usual settings.
    """
    method, samples = config.method, config.method.samples_per_group(config)
    if not method.compares_features(config) or config.streaming or model_config is None:
        return
    width = model_config.get_text_config().hidden_size * len(set(config.ebft.feature_layers))
    per_block = 4 * (samples * width + (samples**2 if samples > 1 else 0))
    total, where = total_memory()
    most = config.sequence_len // config.ebft.stride + 1 if method.samples_blocks else 1
    if total is None or per_block * most <= total:
        return
    blocks = 1
    if method.samples_blocks:
        counts = sorted(
            sum(num_blocks(config, part, config.sequence_len) for part in row.get("documents", [row])) for row in data
        )
        seen = planned_steps(config, this_machine(), len(data)) * rows_per_step(config)
        blocks = counts[min(len(counts), max(1, seen)) - 1]
    if per_block * blocks > total:
        key = "ebft.n_samples_per_prompt" if method.samples_blocks else "trl.num_generations"
        shorter = ", or sequence_len, or increase ebft.stride" if method.samples_blocks else ""
        raise ConfigError(
            f"One training step needs at least {gib(per_block * blocks)} for the features of {samples:,} rollouts "
            f"({key}) at {blocks:,} anchor{'s' * (blocks > 1)} of a row, but {where} has {gib(total)} of memory. "
            f"Reduce {key}{shorter}."
        )


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
