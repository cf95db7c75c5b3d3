"""Rollouts of later batches, generated on a background thread while earlier ones are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Protocol, TypeVar

Batch = TypeVar("Batch")
Result = TypeVar("Result", covariant=True)


class Job(Protocol[Result]):
    """A job to run on the background thread."""

    def run(self) -> Result: ...


class Prefetcher(Generic[Batch, Result]):
    """Runs jobs in the order in which batches are submitted, at most `depth` ahead of those whose result was asked for.

    `prepare(batch)` creates the job on the calling thread when the job is started. It fixes the weights used for
    sampling, which therefore depend only on the order of calls.
    """

    def __init__(self, depth: int, prepare: Callable[[Batch], Job[Result]]) -> None:
        self._depth, self._prepare = depth, prepare
        self._submitted: deque[Batch] = deque()
        self._started: deque[tuple[Batch, Job[Result], Future]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ebft-rollouts")

    def submit(self, batch: Batch) -> None:
        """Ask for the job of `batch`, after those of all batches submitted before it."""
        self._submitted.append(batch)

    def result(self, batch: Batch) -> tuple[Job[Result], Result]:
        """Return the job of `batch`, the next one submitted, and its result, after starting the next `depth` jobs.

        Raises RuntimeError if `batch` is not the next one submitted.
        """
        self._start(self._depth + 1)
        if not self._started or self._started[0][0] is not batch:
            raise RuntimeError("batches must be taken in the order in which they were submitted")
        _, job, future = self._started[0]
        result = future.result()
        self._started.popleft()
        return job, result

    def raise_failure(self) -> None:
        """Raise the exception of a started job that has failed, without waiting."""
        for *_, future in self._started:
            if future.done() and future.exception() is not None:
                raise future.exception()

    def close(self, cancel: Callable[[], Any]) -> None:
        """Discard all batches and stop the thread; `cancel` interrupts the running job."""
        self._submitted.clear()
        running = {future for *_, future in self._started if not future.cancel()}
        while running:
            cancel()  # repeatedly, since a conversation may be between two turns
            running = wait(running, timeout=0.1).not_done
        self._executor.shutdown()
        self._started.clear()

    def _start(self, count: int) -> None:
        while self._submitted and len(self._started) < count:
            batch = self._submitted.popleft()
            job = self._prepare(batch)
            self._started.append((batch, job, self._executor.submit(job.run)))


class ReadAhead(Generic[Batch]):
    """Reads the micro-batches of later steps, and calls `submit` with each that completions are generated for.

    `every`: the micro-batches that are trained on the completions of one of them. `ahead`: how many generation batches
    are read in addition to the step's own micro-batches.
    """

    def __init__(self, submit: Callable[[Batch], None], every: int, ahead: int) -> None:
        self._submit, self._every, self._ahead = submit, every, ahead
        self._iterator: Iterator[Batch] | None = None
        self._waiting: deque[Batch] = deque()
        self._count = 0  # micro-batches read so far

    def next(self, iterator: Iterator[Batch], count: int, trained: int, has_generated: bool) -> list[Batch]:
        """Return the next `count` micro-batches of an epoch, after reading the following ones.

        `trained`: the micro-batches trained on so far; `has_generated`: whether completions are left to train on.
        """
        if iterator is not self._iterator:
            self._iterator, self._count = iterator, trained
            self._waiting.clear()
        while len(self._waiting) < count + self._ahead * self._every:
            batch = next(iterator, None)
            if batch is None:
                break
            if self._count % self._every == 0 or (self._count == trained and not has_generated):
                self._submit(batch)
            self._waiting.append(batch)
            self._count += 1
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
