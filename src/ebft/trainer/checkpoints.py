"""Checkpoints: complete or absent, since a staging folder is renamed, and what is read when training is resumed.

That is the state of each process, the schedule, and a description of the rows.
"""

from __future__ import annotations

import json
import os
import random
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.optim.lr_scheduler import LambdaLR

from ebft.errors import EBFTError, SaveError, warn
from ebft.files import CHECKSUMS, STATE, discard, json_object, remove_staged


@contextmanager
def saving(folder: Path, staged: Path, newest: Path, *, is_writer: bool) -> Iterator[None]:
    """Context manager in which whatever is raised deletes `staged`, and becomes a SaveError for `folder`.

    Libraries have no common class of errors for saving: tokenizers raises Exception if the disk is full, torch
    RuntimeError, transformers ValueError for what it does not write. Errors that follow from the end of another
    process are raised as they are. `newest`: the checkpoint that is left then, if it is there.
    """
    try:
        yield
    except SaveError:  # says itself what is left
        raise
    except Exception as error:
        if is_writer:
            remove_staged(staged)
        words = ("gloo", "NCCL", "by peer", "process group", "Broken pipe")
        is_distributed = distributed.is_available() and distributed.is_initialized() and isinstance(error, RuntimeError)
        if isinstance(error, EBFTError) or (is_distributed and any(word in str(error) for word in words)):
            raise  # in the latter case, because another process has ended
        raise SaveError.of(folder, error, newest if newest.is_dir() else None) from error


def rotate(newest: Path, limit: int, best: str | None) -> None:
    """Delete the checkpoints of the lowest steps beside `newest` until `limit` are left; never `newest` or `best`.

    Folders that this package has not written are left, and so are checkpoints of later steps, which the run has not
    continued from, and folders whose name has another step. They do not count.
    """
    last = step_in_name(newest)
    steps = {folder: step_in_name(folder) for folder in newest.parent.glob("checkpoint-*")}
    earlier = sorted((step, folder) for folder, step in steps.items() if step is not None and step < last)
    own = []
    for step, folder in earlier:
        with suppress(OSError, ValueError):
            if (folder / CHECKSUMS).is_file() and json_object(folder / STATE).get("global_step") == step:
                own.append(folder)
    kept = [folder for folder in own if best is not None and folder.name == Path(best).name]
    others = [folder for folder in own if folder not in kept]
    for folder in others[: max(0, len(others) + len(kept) + 1 - max(limit, len(kept) + 1))]:
        try:
            discard(folder)
        except OSError as error:
            warn(f"save_total_limit: {folder} cannot be deleted ({error}).")


def step_in_name(folder: Path) -> int | None:
    """The step in a name such as checkpoint-40; None for other names."""
    found = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return None if found is None else int(found[1])


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
        warn(
            f"{folder} {reason if others else 'has no running_state.pth'}, so what is kept per process is lost: "
            "the sums of metrics since the last log, train_loss of the whole run, and in structured mode and GRPO "
            "the completions sampled for later updates, replayed groups and failed prompts."
        )
    return {}


_JUMP = 0.01  # relative change of a learning rate that is no rounding error


def use_schedule(scheduler: Any, step_of_run: int, warns: bool) -> None:
    """Set the learning rate of the step after a checkpoint to the one of this run's schedule.

    The checkpoint restores the rate that its own schedule gave this step, which differs if the schedule has changed,
    also in length; with `warns`, that is a warning with both rates. Schedules with a state, such as ReduceLROnPlateau,
    have no other value.
    """
    if not isinstance(scheduler, LambdaLR):
        return
    step = scheduler.last_epoch
    rates = [rate * at_step(step) for rate, at_step in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    before, now = max(scheduler.get_last_lr()), max(rates)
    if warns and abs(now - before) > _JUMP * max(now, before):
        warn(
            f"The learning rate is {now:.3g} instead of {before:.3g} after step {step_of_run}, where training resumes, "
            "because the schedule of this run differs from its checkpoint's. To continue the former one, restore the "
            "length of the run (max_steps, num_epochs, the data), the warm-up and lr_scheduler."
        )
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.load_state_dict(scheduler.state_dict() | {"_last_lr": rates})  # what is logged


# Rows that are compared with the checkpoint's: their name among the `stateful_callbacks` of trainer_state.json,
# what they are called, and what follows from a difference.
_ROWS = (
    (
        "TrainingRows",
        "training",
        "Training continues from step {} at the same position in the new data, so rows may be repeated or left out. "
        "For an exact continuation, resume with the same datasets, val_set_size and sequence_len.",
    ),
    (
        "EvaluationRows",
        "evaluation",
        "Evaluations cannot be compared with earlier ones, and so neither can the best checkpoint.",
    ),
)


def compare_rows(state: Any, training: Any, held_out: Any, *, warns: bool) -> None:
    """Warn if the rows differ from the rows of the checkpoint in `state`, and describe them there."""
    for (name, kind, effect), rows in zip(_ROWS, (training, held_out)):
        now, saved = describe_rows(rows), state.stateful_callbacks.get(name)
        if now is None:
            continue
        state.stateful_callbacks[name] = now
        if saved is None or saved == now or not warns:
            continue
        if saved.get("rows") != now["rows"]:
            changed = f"{now['rows']:,} rows instead of {saved.get('rows'):,}"
        else:
            changed = f"{now['rows']:,} rows as before, with other contents or in another order"
        warn(f"The {kind} data differ from the checkpoint's: {changed}. {effect.format(state.global_step)}")


def describe_rows(rows: Any) -> dict[str, int] | None:
    """The number of rows and a checksum of up to 256 rows, evenly spaced; None for data without a length."""
    parts = list(rows.values()) if isinstance(rows, dict) else [rows]
    if not all(hasattr(part, "__len__") for part in parts):
        return None
    # Other objects than arrays and tensors by their type, since their text may contain addresses.
    plain, digest = lambda value: value.tolist() if hasattr(value, "tolist") else type(value).__name__, 0
    for part in parts:
        for index in range(0, len(part), max(1, -(-len(part) // 256))):
            digest = zlib.crc32(json.dumps(part[index], sort_keys=True, default=plain).encode(), digest)
    return {"rows": sum(map(len, parts)), "checksum": digest}


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


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the random state after the block: an evaluation must not change the training after it."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
