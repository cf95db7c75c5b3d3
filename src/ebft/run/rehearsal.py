"""What would end a run after hours, found before the first step: a rehearsal of the save, disk space and memory."""

from __future__ import annotations

from pathlib import Path

from ebft.errors import EBFTError, SaveError, save_problem, warn
from ebft.files import STAGING, remove_staged
from ebft.machine import free_disk, gib
from ebft.run.config.schema import RunConfig
from ebft.run.reporting import write_model_card
from ebft.run.trainer import planned_steps, steps_of_epoch, this_machine
from ebft.trainer import OverTrainer

# Optimizer values per trained weight; AdamW and similar ones otherwise. In bytes for 8-bit optimizers.
_STATES = {"sgd": 0, "adafactor": 0, "adagrad": 1, "lion": 1, "rmsprop": 1}


def rehearse(config: RunConfig, trainer: OverTrainer) -> None:
    """Save all but the weights of a whole model and the optimizer state, and delete it. Raises SaveError."""
    if not trainer.args.should_save or trainer.is_deepspeed_enabled:  # which has emptied the weights
        return
    output_dir = Path(config.output_dir)
    staged = output_dir / STAGING / "rehearsal"
    try:
        remove_staged(staged)
        trainer.rehearse_save(staged)
        write_model_card(config, {}, staged)
    except EBFTError:
        raise
    except Exception as error:  # of any library that writes a file
        raise SaveError(
            f"The model could not be saved in {output_dir}, so training is not started: {save_problem(staged, error)}"
        ) from error
    finally:
        remove_staged(staged)


def check_space(config: RunConfig, trainer: OverTrainer, rows: int, is_resumed: bool) -> None:
    """Raise SaveError if the weights alone need more than the free space, and warn if checkpoints are estimated to."""
    if not trainer.args.should_save:
        return
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    saved = trained if config.adapter is not None else list(trainer.model.parameters())
    weights = sum(weight.numel() * weight.element_size() for weight in saved)
    states = sum(weight.numel() * optimizer_bytes(config.optimizer, weight.element_size()) for weight in trained)
    count = checkpoints_kept(config, rows)
    count = min(count, 1) if is_resumed else count  # others may be there already
    problem, _ = disk_need(config, weights, weights + (0 if config.save_only_model else states), count)
    if problem is None:
        return
    if weights > free_disk(config.output_dir)[0]:
        raise SaveError(f"The model could not be saved, so training is not started: it needs {problem}")
    warn(f"output_dir: the disk may become full, which ends the run. It needs {problem}")


def disk_need(config: RunConfig, weights: int, checkpoint: int, count: int) -> tuple[str | None, str]:
    """What a run needs on the disk for `count` checkpoints and the model, in bytes: the problem, if any, and facts."""
    total = checkpoint * count + weights
    free, existing = free_disk(config.output_dir)
    kept = f"{count} checkpoint{'' if count == 1 else 's'}"
    text = f"about {gib(total)} for {kept} and the model; {gib(free)} are free in {existing}"
    remedy = "Set save_total_limit, save_only_model: true, a larger save_steps, or an output_dir on another disk."
    return f"{text}. {remedy}" if total > free else None, text


def checkpoints_kept(config: RunConfig, rows: int) -> int:
    """Number of checkpoints that are on the disk at the same time."""
    machine = this_machine()
    steps = planned_steps(config, machine, rows)
    per_epoch = steps_of_epoch(config, machine, rows)
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


def optimizer_bytes(name: str, trained_bytes: int) -> int:
    """Bytes of optimizer state per trained weight."""
    if "4bit" in name:
        return 1
    if "8bit" in name:
        return 1 if "lion" in name or "rmsprop" in name else 2
    known = next((values for key, values in _STATES.items() if name.startswith(key)), 2)
    return known * trained_bytes
