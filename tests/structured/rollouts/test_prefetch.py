"""Batches made ahead: in order, no further ahead than asked, failures reported at once, nothing left running."""

import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from ebft.structured.generation import Prefetcher


def ran_ahead(depth, run, batches):
    started = []
    job = lambda batch: SimpleNamespace(batch=batch, run=lambda: run(batch))
    prefetcher = Prefetcher(depth, lambda batch: started.append(batch) or job(batch))
    for batch in batches:
        prefetcher.submit(batch)
    return prefetcher, started


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_is_started_when_the_one_before_it_is_taken(depth):
    batches = ["a", "b", "c", "d"]
    prefetcher, started = ran_ahead(depth, str.upper, batches)
    assert started == []  # only taking fixes the weights
    for number, batch in enumerate(batches):
        job, result = prefetcher.result(batch)
        assert (job.batch, result) == (batch, batch.upper())
        assert started == batches[: number + 1 + depth]
    prefetcher.close(lambda: None)
    prefetcher, _ = ran_ahead(depth, str.upper, ["a", "b"])
    with pytest.raises(AssertionError, match="in the order"):
        prefetcher.result("b")
    prefetcher.close(lambda: None)


def test_a_failure_is_told_before_its_batch_is_due():
    failed = threading.Event()

    def run(batch):
        if batch == "b":
            failed.set()
            raise ValueError("the cause")
        return batch

    prefetcher, _ = ran_ahead(1, run, ["a", "b", "c"])
    prefetcher.result("a")
    failed.wait(5)
    prefetcher._started[0][-1].exception(5)
    with pytest.raises(ValueError, match="the cause"):
        prefetcher.raise_failure()
    prefetcher.close(lambda: None)


def test_closing_interrupts_what_runs():
    running, gate, cancelled = threading.Event(), threading.Event(), []

    def run(batch):
        if batch == "b":
            running.set()
            gate.wait(30)
            raise CancelledError
        return batch

    prefetcher, _ = ran_ahead(2, run, ["a", "b", "c"])
    prefetcher.result("a")
    running.wait(5)
    prefetcher.close(lambda: (cancelled.append(1), gate.set()))
    assert cancelled
    assert not any(thread.name.startswith("ebft-rollouts") for thread in threading.enumerate())
