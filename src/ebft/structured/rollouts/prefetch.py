"""Prefetching of rollouts for later batches on a background thread while the current batch trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Protocol, TypeVar

Batch = TypeVar("Batch")
Result = TypeVar("Result", covariant=True)


class Job(Protocol[Result]):
    """A job to run on the background thread."""

    def run(self) -> Result: ...


class Prefetcher(Generic[Batch, Result]):
    """Runs jobs in the order in which batches are announced, at most `depth` ahead of those taken.

    `prepare(batch)` creates the job on the calling thread when the job is started. It fixes the weights used for
    sampling, which therefore depend only on the order of calls.
    """

    def __init__(self, depth: int, prepare: Callable[[Batch], Job[Result]]) -> None:
        self._depth, self._prepare = depth, prepare
        self._announced: deque[Batch] = deque()
        self._started: deque[tuple[Batch, Job[Result], Future]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ebft-rollouts")

    def announce(self, batch: Batch) -> None:
        """Announce that `batch` will be taken, after all batches announced before it."""
        self._announced.append(batch)

    def take(self, batch: Batch) -> tuple[Job[Result], Result]:
        """Return the job of `batch`, the next one announced, and its result, after starting the next `depth` jobs.

        Raises RuntimeError if `batch` is not the next one announced.
        """
        self._start(self._depth + 1)
        if not self._started or self._started[0][0] is not batch:
            raise RuntimeError("batches must be taken in the order in which they were announced")
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
        self._announced.clear()
        running = {future for *_, future in self._started if not future.cancel()}
        while running:
            cancel()  # repeatedly, since a conversation may be between two turns
            running = wait(running, timeout=0.1).not_done
        self._executor.shutdown()
        self._started.clear()

    def _start(self, count: int) -> None:
        while self._announced and len(self._started) < count:
            batch = self._announced.popleft()
            job = self._prepare(batch)
            self._started.append((batch, job, self._executor.submit(job.run)))
