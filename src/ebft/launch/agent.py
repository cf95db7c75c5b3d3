"""Running a launcher in this process, which passes signals on to the processes it started and ends with their status.

Launchers give their processes 30 seconds to end after a signal, which is not enough for a step and a checkpoint, and
end with a traceback of their own. Here, the launcher runs in a thread, in which torch installs no signal handlers, and
the main thread sends each signal to the processes and waits for as long as they need.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from ebft.errors import LaunchError, cause
from ebft.launch.command import environment, launcher_arguments
from ebft.launch.passed_on import parsed_arguments
from ebft.launch.plan import ACCELERATE, Plan
from ebft.launch.signals import SIGNALS, passed_on, received_signals
from ebft.launch.worker import COMMAND, FAILED, FOLDER, PARENT, TRACEBACK, typed_command
from ebft.printed import say

_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_KILLING = 3  # so many times Ctrl-C kills processes that do not end
_STARTUP = 10.0  # seconds after a signal in which processes that are starting still report their ids
_SAME_TIME = 5  # seconds between a process that is killed and the errors of others that follow from it
_POLL = 0.1  # seconds
_LOGGERS = ("torch.distributed", "torch.multiprocessing", "accelerate")


def launch(plan: Plan, words: Sequence[str]) -> int:
    """Run `ebft WORDS` in the processes of the plan on this machine; returns their exit status, 128 + n for a signal n.

    Raises LaunchError if they cannot be started or one was killed, ConfigError for options that the launcher does not
    accept, KeyboardInterrupt if a signal arrives before they have started.
    """
    start = _prepared(plan.launcher, launcher_arguments(plan, words))
    with (
        _launch_folder() as folder,
        _variables(environment(plan) | {FOLDER: str(folder), PARENT: str(os.getpid())}),
        _quiet(),
    ):
        command = typed_command(["ebft", *words, *plan.options.words()])
        (folder / COMMAND).write_text(json.dumps(command), encoding="utf-8")
        with received_signals() as received:
            ended = _run(start, folder, received)
        return _status(ended, folder, bool(received))


def _prepared(launcher: str, arguments: list[str]) -> Callable[[], None]:
    """The call of the launcher with its parsed arguments."""
    parsed = parsed_arguments(launcher, arguments)
    if launcher == ACCELERATE:
        from accelerate.commands.launch import launch_command as run
    else:
        from torch.distributed.run import run
    return lambda: run(parsed)


def _run(start: Callable[[], None], folder: Path, received: list[int]) -> BaseException | None:
    """Run the launcher in a thread, and send what is in `received` to its processes; returns its exception, if any."""
    ended: list[BaseException] = []

    def run() -> None:
        try:
            start()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, name="launcher", daemon=True)
    thread.start()
    sent: dict[int, int] = {}
    first_signal = None
    while thread.is_alive():
        thread.join(_POLL)
        if not received:
            continue
        first_signal = first_signal or time.monotonic()
        _forward(received, folder, sent)
        if not sent and time.monotonic() - first_signal > _STARTUP:  # for example, it still waits for other machines
            raise KeyboardInterrupt("Interrupted before training started; nothing was saved.")
    return ended[0] if ended else None


def _forward(received: list[int], folder: Path, sent: dict[int, int]) -> None:
    """Send each process the signals that it has not been sent yet; `sent` counts them by process."""
    for path in folder.glob("*.pid"):
        text = path.read_text()
        if not text.isdigit():  # it is being written
            continue
        pid = int(text)
        new = received[sent.get(pid, 0) :]
        sent[pid] = len(received)
        for number in new:
            kills = received.count(signal.SIGINT) >= _KILLING
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kills else passed_on(number))


def _status(error: BaseException | None, folder: Path, was_signalled: bool) -> int:
    """The exit status of the processes, from how the launcher ended; prints the traceback that one of them left."""
    if error is None:
        return 0
    if isinstance(error, CalledProcessError):  # of accelerate, for one process
        code, who = error.returncode, "The process"
    else:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if not isinstance(error, ChildFailedError):
            raise LaunchError(f"The processes cannot be started: {cause(error)}") from error
        rank, code = _first_failure(error.failures, folder)
        who = f"The process of rank {rank}"
    if code < 0:
        return _of_signal(-code, who, was_signalled)
    if (folder / TRACEBACK).exists():
        say(f"\n{who} failed:\n{(folder / TRACEBACK).read_text(encoding='utf-8')}", err=True)
    elif not (folder / FAILED).exists() and code not in _INTERRUPTED:
        raise LaunchError(f"{who} ended with exit status {code}.", status=code)
    return code


def _first_failure(failures: Mapping[int, Any], folder: Path) -> tuple[int, int]:
    """The rank and exit status that the others follow from: of a killed process, or else the first that has reported.

    The launcher stops all processes when one ends, also the first that reported, if another ended before it: then the
    status is that of the other, which failed for the same reason.
    """
    earliest = min(failure.timestamp for failure in failures.values())
    for rank, failure in failures.items():
        ends_itself = failure.exitcode >= 0 or -failure.exitcode in SIGNALS
        if not ends_itself and failure.timestamp <= earliest + _SAME_TIME:  # later ones are killed by the launcher
            return rank, failure.exitcode
    with contextlib.suppress(OSError, ValueError):
        rank = int((folder / FAILED).read_text())
        if rank in failures:
            ended = [failure.exitcode for failure in failures.values() if failure.exitcode > 0]
            return rank, ended[0] if ended and failures[rank].exitcode < 0 else failures[rank].exitcode
    rank, failure = max(failures.items(), key=lambda item: item[1].exitcode > 0)  # one that was not stopped, if any
    return rank, failure.exitcode


def _of_signal(number: int, who: str, was_signalled: bool) -> int:
    """The exit status for a process that a signal ended; an error if the signal was not passed on from here."""
    if not (was_signalled and number in (*SIGNALS, signal.SIGKILL)):
        reason = ", for example because memory ran out" if number == signal.SIGKILL else ""
        raise LaunchError(f"{who} was killed by {signal.Signals(number).name}{reason}.", status=128 + number)
    return 128 + number


@contextlib.contextmanager
def _launch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ebft-launch-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Context manager in which the environment, also that of new processes, has these variables."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager in which launchers log nothing: the processes report their errors, and this command the rest."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
