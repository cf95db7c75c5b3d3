"""Reward functions in worker processes: alarms, time limits, crashes, interruptions, and what is refused."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from pickle import PicklingError

import pytest

from ebft import errors, reward_functions, run_files
from tests.reward_functions import functions
from tests.serving.processes import eventually

A_GROUP = ["a", "a"]


@pytest.fixture
def workers():
    made = []

    def make(timeout=30.0):
        made.append(reward_functions.RewardWorkers(2, timeout, lambda: 2))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_groups_are_shared_among_processes_that_can_set_alarms(workers):
    pool = workers()
    columns = {"prompts": ["a", "a", "b", "b", "c", "c"], "completions": ["", "x", "xx", "xxx", "x" * 4, "x" * 5]}
    call = pool.parallel(functions.with_alarm)
    assert call.__name__ == "with_alarm"
    extra = {"trainer_state": object(), "log_metric": lambda *_: None, "answer": [0, 10, 0, 10, 0, 10]}
    assert call(**columns, **extra) == [0, 11, 2, 13, 4, 15]
    assert pool.parallel(functions.group_means)(**columns) == [0.5, 0.5, 2.5, 2.5, 4.5, 4.5]
    ids = pool.parallel(functions.process_ids)(**columns)
    assert len(set(ids)) == 2 and os.getpid() not in ids
    assert pool.parallel(functions.imported)(**columns) == [0.0] * 6, "a process of each CPU would import PyTorch"


def test_a_group_that_takes_too_long_has_no_reward(workers):
    call = workers(timeout=1.0).parallel(functions.slow_for_some)
    assert call(prompts=["fast", "fast"]) == [1, 1]
    started = time.monotonic()
    with pytest.warns(UserWarning, match=r"slow_for_some took longer than 1 s \(reward_timeout\)"):
        assert call(prompts=["fast", "fast", "slow", "slow", "fast", "fast"]) == [1, 1, None, None, 1, 1]
    assert time.monotonic() - started < 45
    with warnings.catch_warnings(action="error"):  # warned once; the process has been replaced
        assert call(prompts=["slow", "slow", "fast", "fast"]) == [None, None, 1, 1]


def test_a_dead_process_is_replaced(workers, tmp_path):
    call, flag = workers().parallel(functions.crashes_for_some), str(tmp_path / "flag")
    message = r"crashes_for_some ended its process twice \(exit code 7\)"
    with pytest.warns(UserWarning, match=message):  # the first of all calls
        assert call(prompts=["crash", "crash"]) == [None, None]
    pool = workers()
    assert pool.parallel(functions.crashes_once)(prompts=A_GROUP, flag=[flag, flag]) == [3, 3]
    with pytest.warns(UserWarning, match=message):
        assert pool.parallel(functions.crashes_for_some)(prompts=["crash", "crash", "a", "a"]) == [None, None, 2, 2]


def test_what_runs_in_this_process(workers):
    async def judged(**columns): ...

    class Judge:
        def __call__(self, **columns): ...

    judge, pool, alarm = Judge(), workers(), functions.with_alarm
    for function in ("some/reward-model", judged, judge):
        assert pool.parallel(function) is function
    assert reward_functions.run_in_workers([alarm, judge], 1, None, lambda: 2) == [alarm, judge]
    assert reward_functions.run_in_workers(["some/reward-model"], 4, None, lambda: 2) == ["some/reward-model"]
    with pytest.raises((AttributeError, PicklingError)) as caught:
        pool.parallel(lambda **columns: [])
    assert "test_workers.test_what_runs_in_this_process.<locals>.<lambda> to a process" in caught.value.__notes__[0]


ERRORS = {"timeout": "TimeoutError: the sandbox did not answer", "odd": "Odd: no answer"}


def test_errors_of_functions_say_where(workers):
    pool, prompts = workers(), ["a"] * 4
    for kind, message in ERRORS.items():
        with pytest.raises(errors.RewardError, match=rf"raises failed: {message} \(.*functions.py, line \d+: "):
            pool.parallel(functions.raises)(prompts=prompts, kind=[kind] * 4)
    with pytest.raises(errors.RewardError, match="one_too_few returned 1 rewards for 2 completions"):
        pool.parallel(functions.one_too_few)(prompts=prompts)
    assert pool.parallel(functions.generates)(prompts=prompts) == [1.0] * 4


def test_a_function_whose_process_always_ends_is_an_error(workers):
    call = workers().parallel(functions.always_ends)
    with pytest.warns(UserWarning, match=r"always_ends ended its process twice \(exit code 0\)"):
        assert call(prompts=["a"] * 4) == [None] * 4
    with pytest.raises(errors.RewardError, match="always_ends ended its process twice .* in each of its last calls"):
        call(prompts=["a"] * 12)


def test_an_interrupted_call_leaves_no_result_to_the_next():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever tests before left
    pool = reward_functions.RewardWorkers(2, None, lambda: 1)
    call = pool.parallel(functions.sleeps)
    ids = pool.parallel(functions.process_ids)(prompts=["a", "b"])
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call(prompts=[60.0, 60.1, 60.2])
    assert time.monotonic() - started < 20 and not any(run_files.is_alive(int(process)) for process in ids)
    assert call(prompts=[0.2, 0.3]) == [0.2, 0.3] and time.monotonic() - started < 30, "nothing is tried again"
    pool.close()
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("exit_code", [None, 5])
def test_programs_end_with_the_process_that_started_them(tmp_path, exit_code):
    path, pool = tmp_path / "id", reward_functions.RewardWorkers(1, 2.0, lambda: 1)
    with pytest.warns(UserWarning, match="took longer than 2 s" if exit_code is None else "exit code 5"):
        assert pool.parallel(functions.runs_a_program)(prompts=[str(path)], code=[exit_code]) == [None]
    assert eventually(lambda: not run_files.is_alive(int(path.read_text())))
    pool.close()


def test_processes_end_with_a_killed_owner(tmp_path):
    code = "from ebft.reward_functions import RewardWorkers\nfrom tests.reward_functions import functions\n"
    code += "if __name__ == '__main__':\n    RewardWorkers(1, None, lambda: 1).parallel(functions.waits)"
    (tmp_path / "owner.py").write_text(f"{code}(prompts=[{str(tmp_path / 'id')!r}])\n")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    owner = subprocess.Popen([sys.executable, tmp_path / "owner.py"], env={**os.environ, "PYTHONPATH": path})
    assert eventually(lambda: (tmp_path / "id").exists() and (tmp_path / "id").read_text())
    owner.kill()
    owner.wait(10)
    worker = int((tmp_path / "id").read_text())
    assert eventually(lambda: not run_files.is_alive(worker))
