"""Processes that call functions: their order, time limits, ends, and what is left of a call that was interrupted."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import Mock

import pytest

from ebft.reward_functions.processes import Expired, Processes
from ebft.run_files import is_alive
from tests.reward_functions import functions

ROOT = Path(__file__).parents[2]


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def processes():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever tests before left
    made = []

    def make(count=2, timeout=30.0):
        made.append(Processes(count, timeout))
        return made[-1]

    yield make
    for each in made:
        each.close()
    signal.signal(signal.SIGINT, handler)


def test_results_are_in_the_order_of_the_calls_whatever_processes_end(processes):
    pool = processes()
    assert pool.map(functions.sleeps, [(0.3, "a"), (0.0, "b"), (0.1, "c"), (0.0, "d")]) == list("abcd")
    assert pool.map(functions.sleeps, []) == []
    calls = [(None,) if i % 3 else (i,) for i in range(12)]
    assert pool.map(functions.exits, calls) == ["worked" if i % 3 else Expired(i) for i in range(12)]
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        pool.map(functions.sleeps, [(0.0, "a"), (0.0, threading.Lock()), (0.0, "b")])
    assert pool.map(functions.sleeps, [(0.0, "c")]) == ["c"]
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.map(functions.sleeps, [(0.0, "a")])


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

    assert processes(count=1).map(only_here.one, [()]) == [Expired(1, was_called=False)]
    assert "no such file" in capfd.readouterr().err


def test_an_interrupted_call_leaves_no_result_to_the_next(processes):
    pool = processes()
    assert pool.map(functions.sleeps, [(0.0, "a"), (0.0, "b")]) == ["a", "b"]
    interrupted(pool, functions.sleeps, [(60.0, "old")] * 3, 0.5)
    assert pool.map(functions.sleeps, [(0.0, "c"), (0.0, "d")]) == ["c", "d"]


def test_an_interruption_while_arguments_are_sent(processes):
    pool = processes(count=1)
    interrupted(pool, functions.sleeps, [(1.0, b"old" * 10_000_000)], 0.02)  # while the process starts
    assert pool.map(functions.sleeps, [(0.0, "new")]) == ["new"]


def interrupted(pool, function, calls, *seconds):
    for delay in seconds:
        threading.Timer(delay, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        pool.map(function, calls)


def test_a_second_interruption_while_processes_are_stopped(processes):
    pool = processes()
    interrupted(pool, functions.ignores_the_end, [(2.5, "old1"), (2.5, "old2")], 1.0, 1.5)
    assert pool.map(functions.sleeps, [(0.0, "new1"), (0.0, "new2")]) == ["new1", "new2"]


def test_a_process_that_cannot_start(processes, monkeypatch):
    pool = processes(count=1)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no more processes"):
        patch.setattr(BaseProcess, "start", Mock(side_effect=OSError("no more processes")))
        pool.map(functions.sleeps, [(0.0, "a")])
    assert pool.map(functions.sleeps, [(0.0, "b")]) == ["b"]


def test_processes_that_ignore_the_signal_are_stopped_together(processes):
    pool = processes(count=4)
    started = time.monotonic()
    interrupted(pool, functions.ignores_the_end, [(60.0, "a")] * 4, 1.0)
    assert time.monotonic() - started < 9  # one after another: 13


@pytest.mark.parametrize("exit_code", [None, 5])
def test_programs_end_with_the_process_that_started_them(processes, tmp_path, exit_code):
    path, pool = tmp_path / "id", processes(count=1, timeout=2.0)
    assert pool.map(functions.runs_a_program, [(str(path), exit_code)]) == [Expired(exit_code)]
    wait_for(lambda: not is_alive(int(path.read_text())))


def test_a_copy_that_the_function_forks_sends_nothing(processes):
    pool = processes(count=1)
    assert [pool.map(functions.returns_twice, [(i,)])[0] for i in range(4)] == [0, 1, 2, 3]


def test_processes_end_with_a_killed_owner(tmp_path):
    code = (
        "from ebft.reward_functions.processes import Processes\n"
        "from tests.reward_functions import functions\n"
        "if __name__ == '__main__':\n"
        f"    Processes(1, None).map(functions.writes_id_and_waits, [({str(tmp_path / 'id')!r},)])\n"
    )
    (tmp_path / "owner.py").write_text(code)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    owner = subprocess.Popen([sys.executable, tmp_path / "owner.py"], env={**os.environ, "PYTHONPATH": path})
    wait_for(lambda: (tmp_path / "id").exists() and (tmp_path / "id").read_text())
    owner.kill()
    owner.wait(10)
    worker = int((tmp_path / "id").read_text())
    wait_for(lambda: not is_alive(worker))


def test_processes_end_with_their_owner():
    pool = Processes(2, None)
    ids = pool.map(functions.process_id, [(), ()])
    assert set(ids) <= {child.pid for child in multiprocessing.active_children()}
    del pool
    assert not set(ids) & {child.pid for child in multiprocessing.active_children()}
