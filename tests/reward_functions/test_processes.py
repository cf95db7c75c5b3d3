"""Processes that call functions: their order, time limits, ends, and what is left of a call that was interrupted."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from ebft.reward_functions.processes import Expired, Processes
from tests.reward_functions import functions


@pytest.fixture
def processes():
    made = []

    def make(count=2, timeout=30.0):
        made.append(Processes(count, timeout))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_results_are_in_the_order_of_the_calls(processes):
    assert processes().map(functions.sleeps, [(0.3, "a"), (0.0, "b"), (0.1, "c"), (0.0, "d")]) == list("abcd")
    assert processes().map(functions.sleeps, []) == []


def test_processes_that_end_at_once_are_replaced_each_time(processes):
    calls = [(None,) if i % 3 else (i,) for i in range(30)]
    expected = ["worked" if i % 3 else Expired(i) for i in range(30)]
    assert processes().map(functions.exits, calls) == expected


def test_the_time_limit_is_that_of_each_call(processes):
    pool = processes(timeout=1.0)
    calls = [(0.6, "a"), (0.6, "b"), (60.0, "c"), (0.6, "d"), (0.6, "e")]
    assert pool.map(functions.sleeps, calls) == ["a", "b", Expired(None), "d", "e"]


def test_a_process_that_ended_between_two_calls(processes):
    pool = processes(count=1)
    (ended,) = pool.map(functions.process_id, [()])
    os.kill(ended, signal.SIGKILL)
    (replaced,) = pool.map(functions.process_id, [()])
    assert replaced == Expired(-signal.SIGKILL) or replaced != ended
    assert pool.map(functions.process_id, [()])[0] not in (ended, os.getpid())


def test_a_process_whose_child_keeps_the_connection_open(processes):
    started = time.monotonic()
    assert processes(count=1).map(functions.exits_with_a_child, [()]) == [Expired(5)]
    assert time.monotonic() - started < 20  # the child lives for a minute


def test_what_cannot_be_imported_ends_the_process(processes, tmp_path, monkeypatch, capfd):
    (tmp_path / "only_here.py").write_text(
        "import multiprocessing\nif multiprocessing.parent_process(): open('no such file')\ndef one(): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    assert processes(count=1).map(only_here.one, [()]) == [Expired(1)]
    assert "no such file" in capfd.readouterr().err


def test_an_interrupted_call_leaves_no_result_to_the_next(processes):
    pool = processes()
    assert pool.map(functions.sleeps, [(0.0, "a"), (0.0, "b")]) == ["a", "b"]
    interrupt = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        pool.map(functions.sleeps, [(60.0, "old")] * 3)
    assert pool.map(functions.sleeps, [(0.0, "c"), (0.0, "d")]) == ["c", "d"]


def test_arguments_that_cannot_be_pickled(processes):
    pool = processes()
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        pool.map(functions.sleeps, [(0.0, "a"), (0.0, threading.Lock()), (0.0, "b")])
    assert pool.map(functions.sleeps, [(0.0, "c")]) == ["c"]


def test_processes_end_with_their_owner():
    pool = Processes(2, None)
    ids = pool.map(functions.process_id, [(), ()])
    assert set(ids) <= {child.pid for child in multiprocessing.active_children()}
    del pool
    assert not set(ids) & {child.pid for child in multiprocessing.active_children()}
