"""What a worker of Ray Train does: training as a process of any launcher does, with reports to Ray and restarts."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero
from transformers import TrainerCallback

from ebft.config.user_functions import place_of
from ebft.errors import EBFTError, LaunchError, doing, told
from ebft.printed import say, traced
from ebft.run.callbacks import StopOnSignal, TrainingInterrupted
from ebft.run.checkpoints import how_to_resume, newest_checkpoint, step_of
from ebft.run.config.schema import RunConfig
from ebft.run.output import final_step, wait_until_free
from ebft.run.training import train_until
from ebft.tools.launch.ray_control import RunOutcome, WorkerFailure, WorkerTask

POINTER = "ebft.json"  # the only file of the checkpoint that Ray stores; it names the folder of the model
_KILLED_WITHIN = 60.0  # seconds that Ray may need to kill the processes of an earlier attempt
_WRONG_INPUT, _FAILED = 2, 1  # exit statuses
_SIGNALLED = 128


class StopOnDriver(StopOnSignal):
    """Stops a run on the signals that the command `ebft train` received, and reports its logs to Ray."""

    is_ray_worker = True

    def __init__(self, task: WorkerTask) -> None:
        super().__init__(task.command)
        self._control = task.control

        def wait() -> None:
            with suppress(Exception):  # of Ray, which ends before this thread
                self.request(ray.get(self._control.wait_for_signal.remote()))

        threading.Thread(target=wait, name="signals", daemon=True).start()

    def follow(self, trainer: Any) -> None:
        super().follow(trainer)
        trainer.add_callback(ReportToRay(self._control))


class ReportToRay(TrainerCallback):
    """Reports the last value of each metric to Ray at each log, on all workers, which Ray requires."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self._metrics: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            ray.get(self._control.note_begun.remote())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._metrics |= plain(logs or {}) | {"step": state.global_step}
        ray.train.report(dict(self._metrics))


def train_noting_errors(task: WorkerTask) -> RunOutcome:
    """Train in this worker; errors are noted by the control actor, and raised for Ray Train."""
    rank = ray.train.get_context().get_world_rank()
    try:
        return _trained(task, rank)
    except TrainingInterrupted as stopped:  # after the same step on all workers, or while rank 0 pushes to the Hub
        ray.train.report({})  # all report as often, or the others would wait
        return RunOutcome(_SIGNALLED + stopped.signal_number, message=str(stopped))
    except BaseException as error:
        own = isinstance(error, EBFTError)
        status = error.status if isinstance(error, LaunchError) else _WRONG_INPUT if own else _FAILED
        message = str(error) if own else f"{told(error)}{place_of(error)}"  # as `ebft train` prints it in one process
        ray.get(task.control.fail.remote(WorkerFailure(rank, status, message, traced(error))))
        raise RuntimeError(message) from None  # errors of users may not be serializable


def _trained(task: WorkerTask, rank: int) -> RunOutcome:
    with doing("entering the working folder of the command, which all machines of the cluster need (use_ray)"):
        os.chdir(task.folder)
    config = RunConfig.from_dict(task.values)
    begun = None
    if rank == 0:
        first = ray.get(task.control.begin.remote())
        if first.earlier:
            wait_until_free(Path(config.output_dir), _KILLED_WITHIN)
        begun = first, changes_on_restart(config) if first.has_begun else {}
    attempt, changes = broadcast_from_rank_zero(begun)
    if attempt.earlier and rank == 0:
        say(f"Attempt {attempt.earlier + 1} of {config.ray_max_failures + 1}, after: {attempt.reason}", err=True)
    if attempt.signal is not None:
        message = "Interrupted before training started; nothing was saved."
        if attempt.has_begun:
            step = max(0, _step_reached(config))
            message = how_to_resume(config, step, config.resume_from_checkpoint, task.command)
        raise TrainingInterrupted(message, attempt.signal)
    result = train_until(config.model_copy(update=changes), StopOnDriver(task))
    # With a checkpoint that names the model's folder: Ray keeps no others.
    metrics = plain(result.metrics) | {"step": result.trainer.state.global_step}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, POINTER).write_text(json.dumps({"output_dir": os.path.abspath(result.output_dir)}) + "\n")
        checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report(metrics, checkpoint=checkpoint)
    return RunOutcome(0, learned=result.describe_outcome(task.evaluate))


def changes_on_restart(config: RunConfig) -> dict[str, Any]:
    """Keys with other values when a run restarts: it continues from its own newest checkpoint, if there is one."""
    named = config.resume_from_checkpoint
    if named is not None and _step_reached(config) < step_of(Path(named)):
        return {}
    return {"resume_from_checkpoint": None, "auto_resume_from_checkpoints": True}


def _step_reached(config: RunConfig) -> int:
    """The step of the newest checkpoint or final model in the output folder; -1 if there is none."""
    output_dir = Path(config.output_dir)
    newest, final = newest_checkpoint(output_dir), final_step(output_dir)
    return max(-1 if newest is None else step_of(newest), -1 if final is None else final)


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics with Python numbers in place of scalars of torch and numpy, which Ray does not accept."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
