"""What is read when training is resumed: the state of each process, the schedule, and a description of the rows."""

from __future__ import annotations

import json
import logging
import os
import random
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR


def running_state_path(folder: str, args: Any) -> str:
    """The file with the running state of this process in a checkpoint."""
    rank = f"_{args.process_index}" if args.world_size > 1 else ""
    return os.path.join(folder, f"running_state{rank}.pth")


def read_running_state(folder: str, args: Any) -> dict[str, Any]:
    """The running state of this process; empty, with a warning, if the checkpoint has none that fits."""
    path, processes = running_state_path(folder, args), args.world_size
    device = args.device if args.device.type != "cpu" else "cpu"  # torch does not map to cpu:0
    state = torch.load(path, map_location=device, weights_only=True) if os.path.isfile(path) else {}
    if state.get("processes", processes) == processes and state:
        return state
    if args.process_index == 0:
        reason = f"was not saved by {processes} process{'es' if processes > 1 else ''}, as this run has"
        others = any(Path(folder).glob("running_state*.pth"))
        warnings.warn(
            f"{folder} {reason if others else 'has no running_state.pth'}, so what is kept per process is lost: "
            "the sums of metrics since the last log, train_loss of the whole run, and in structured mode and GRPO "
            "the completions sampled for later updates, replayed groups and failed prompts.",
            stacklevel=2,
        )
    return {}


def use_schedule(scheduler: Any) -> None:
    """Set the learning rate of the step after a checkpoint to the one of this run's schedule.

    The checkpoint restores the rate that its own schedule gave this step, which differs if the schedule has changed,
    also in length. Schedules with a state, such as ReduceLROnPlateau, have no other value.
    """
    if not isinstance(scheduler, LambdaLR):
        return
    step = scheduler.last_epoch
    rates = [rate * at_step(step) for rate, at_step in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.load_state_dict(scheduler.state_dict() | {"_last_lr": rates})  # what is logged


@contextmanager
def without_comparison() -> Iterator[None]:
    """Context manager without the warning about logging_steps, eval_steps, save_steps and batch size of a checkpoint.

    It does not say which of the values apply: always those of this run.
    """
    keep = lambda record: "do not match the ones in the `trainer_state.json`" not in record.getMessage()
    logger = logging.getLogger("transformers.trainer_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


_ROWS, _HELD_OUT = "TrainingRows", "EvaluationRows"  # among the `stateful_callbacks` of trainer_state.json


def compare_rows(state: Any, training: Any, held_out: Any, *, warns: bool) -> None:
    """Warn if the rows are not those of the checkpoint in `state`, and describe them there for the following ones."""
    changed = _difference(state, _ROWS, training)
    if changed is not None and warns:
        warnings.warn(
            f"The training data differ from those of the checkpoint: {changed}. Training continues from step "
            f"{state.global_step} at the same position in the new data, so rows may be repeated or left out. "
            "For an exact continuation, resume with the same datasets, val_set_size and sequence_len.",
            stacklevel=2,
        )
    changed = _difference(state, _HELD_OUT, held_out)
    if changed is not None and warns:
        warnings.warn(
            f"The evaluation data differ from those of the checkpoint: {changed}. Evaluations cannot be compared "
            "with those before, of which the best checkpoint is one.",
            stacklevel=2,
        )


def _difference(state: Any, name: str, rows: Any) -> str | None:
    """How `rows` differ from those that the checkpoint describes; None if they do not. Then describe them."""
    now, saved = describe_rows(rows), state.stateful_callbacks.get(name)
    if now is None:
        return None
    state.stateful_callbacks[name] = now
    if saved is None or saved == now:
        return None
    if saved.get("rows") != now["rows"]:
        return f"{now['rows']:,} rows instead of {saved.get('rows'):,}"
    return f"{now['rows']:,} rows as before, with other contents or in another order"


_READ = 256  # rows whose contents are compared


def describe_rows(rows: Any) -> dict[str, int] | None:
    """The number of rows and a checksum of up to 256 of them, evenly spaced; None for data without a length.

    Several evaluation datasets, by name, are described together.
    """
    parts = list(rows.values()) if isinstance(rows, dict) else [rows]
    if not all(hasattr(part, "__len__") for part in parts):
        return None
    digest = 0
    for part in parts:
        for index in range(0, len(part), max(1, -(-len(part) // _READ))):
            digest = zlib.crc32(json.dumps(part[index], sort_keys=True, default=_plain).encode(), digest)
    return {"rows": sum(map(len, parts)), "checksum": digest}


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists, other objects by their type, since their text may contain addresses."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def random_state() -> dict[str, Any]:
    """Return the states of the random number generators of Python, NumPy and PyTorch."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a result of `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
