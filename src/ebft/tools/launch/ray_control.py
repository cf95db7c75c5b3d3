"""What `ebft train` and the workers of Ray Train pass to each other. All processes of Ray import it: it is light."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ebft.errors import shortened

SETUP = "ebft.tools.launch.ray_control.set_up_process"  # for Ray, which calls it in each process of the job
_WORKER = "ebft.tools.launch.ray_worker"


@dataclass(frozen=True)
class WorkerTask:
    """What all workers of a run are given.

    `values`: keys and values of the config; `command`: the words that the user typed; `evaluate`: the command that
    evaluates the model, if there is one; `folder`: the working folder, for relative paths; `control`: an actor of class
    `Control`.
    """

    values: dict[str, Any]
    command: list[str]
    evaluate: str | None
    folder: str
    control: Any


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: the exit status, what it learned if it is complete, and a message if it was interrupted."""

    status: int
    learned: str = ""
    message: str = ""


@dataclass(frozen=True)
class WorkerFailure:
    """An error of a worker: its message for users, and its traceback."""

    rank: int
    status: int
    message: str
    traceback: str
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class WorkerAttempt:
    """A start of the workers, after `earlier` ones, `reason` for the last failure, and a signal so far."""

    earlier: int
    has_begun: bool
    signal: int | None
    reason: str


class Control:
    """What the command and the workers tell each other, in an actor of Ray."""

    def __init__(self) -> None:
        self._attempts, self._has_begun = 0, False
        self._failures: list[WorkerFailure] = []
        self._signal: int | None = None
        self._signalled = asyncio.Event()

    async def begin(self) -> WorkerAttempt:
        """Start an attempt; called by its first worker."""
        errors = [failure.message.strip() for failure in await self.failures()]
        reason = shortened(errors[0].splitlines()[-1]) if errors else "a worker was killed"
        attempt = WorkerAttempt(self._attempts, self._has_begun, self._signal, reason)
        self._attempts += 1
        self._failures = []
        return attempt

    async def note_begun(self) -> None:
        """Note that training has begun, so that the checkpoints in the output folder belong to this run."""
        self._has_begun = True

    async def stop(self, number: int) -> bool:
        """Pass signal `number` on to the workers; False if there have not been any yet."""
        self._signal = self._signal or number
        self._signalled.set()
        return self._attempts > 0

    async def wait_for_signal(self) -> int:
        """The number of the signal, when it has arrived."""
        await self._signalled.wait()
        return self._signal

    async def fail(self, failure: WorkerFailure) -> None:
        """Note the failure of a worker."""
        self._failures.append(failure)

    async def failures(self) -> list[WorkerFailure]:
        """The failures of the last attempt, the earliest first."""
        return sorted(self._failures, key=lambda failure: failure.time)


def set_up_process() -> None:
    """Make Ray Train log errors only: it would report the lack of a dashboard each second."""
    logging.getLogger("ray.train").setLevel(logging.ERROR)


def train_in_worker(task: WorkerTask) -> RunOutcome:
    """The training function of Ray Train."""
    from ebft.tools.console import show_warnings

    set_up_process()
    logging.getLogger().setLevel(logging.WARNING)  # Python's default; Ray Train has set INFO, and logs every report
    show_warnings()
    # By name, since it imports this module, and transformers, which warns.
    return import_module(_WORKER).train_noting_errors(task)
