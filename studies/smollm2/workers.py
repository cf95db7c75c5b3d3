"""Runs jobs in worker processes. What goes wrong in one job, the end of its process included, stops no other."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


def run_all(
    jobs: Iterable[Any],
    function: Callable[[Any], Any],
    count: int,
    log_of: Callable[[Any], Path],
    needs: Callable[[Any, Any], bool] = lambda job, other: False,
    may_start: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[Any, Any, str | None]]:
    """Yield each job with its result and None, or None and what went wrong, in the order of finishing.

    `count` processes work, each on one job after the other; 0 works in this process. What a job prints goes to the file
    `log_of(job)`. A job waits while one that it `needs` is waiting or at work; no job starts once `may_start` is False.
    """
    waiting, workers, busy = list(jobs), [], {}
    if count == 0:
        while waiting and may_start():
            job = waiting.pop(_first_free(waiting, [], needs))
            yield job, *_outcome(function, job)
        return
    try:
        while waiting or busy:
            while waiting and len(busy) < count and may_start():
                free = _first_free(waiting, [job for _, job in busy.values()], needs)
                if free is None:
                    break
                worker = workers.pop() if workers else Worker(function)
                busy[worker.pipe] = (worker, waiting.pop(free))
                worker.start(busy[worker.pipe][1], log_of)
            if not busy:
                return
            for pipe in wait(list(busy)):
                worker, job = busy.pop(pipe)
                try:
                    outcome = pipe.recv()
                    workers.append(worker)
                except EOFError:
                    outcome = None, f"its process ended with status {worker.end()}"
                yield job, *outcome
    finally:
        for worker in (*workers, *(worker for worker, _ in busy.values())):
            worker.end()


def _first_free(waiting: list[Any], at_work: list[Any], needs: Callable[[Any, Any], bool]) -> int | None:
    """The place of the first job that needs no other one of those that are waiting or at work."""
    for place, job in enumerate(waiting):
        if not any(needs(job, other) for other in (*waiting, *at_work) if other is not job):
            return place
    return None


class Worker:
    """A process that does one job after the other."""

    def __init__(self, function: Callable[[Any], Any]):
        context = multiprocessing.get_context("spawn")  # a forked copy of a process with torch's threads may hang
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, job: Any, log_of: Callable[[Any], Path]) -> None:
        """Give the process a job, whose outcome comes through the pipe."""
        self.pipe.send((job, log_of(job)))

    def end(self) -> int | None:
        """End the process and return its exit status."""
        self.pipe.close()
        self.process.join(timeout=2)  # an idle process ends by itself once the pipe is closed
        self.process.terminate()
        self.process.join()
        return self.process.exitcode


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """The process's loop; Ctrl-C reaches it too, and ends it without a word."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        while True:
            job, log = pipe.recv()
            _print_to(log)
            pipe.send(_outcome(function, job))
    except (EOFError, KeyboardInterrupt):
        return


def _end_with_parent() -> None:
    """A killed parent ends no child; a worker without one would go on with its job, which the next run starts too."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _outcome(function: Callable[[Any], Any], job: Any) -> tuple[Any, str | None]:
    try:
        return function(job), None
    except Exception as error:
        traceback.print_exc()
        return None, f"{type(error).__name__}: {error}"


def _print_to(log: Path) -> None:
    """Send everything that this process prints to `log`, what libraries write past Python included."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
