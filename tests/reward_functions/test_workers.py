"""Reward functions in worker processes: alarms, time limits, crashes, and what is refused."""

import os
import subprocess
import sys
import time
import warnings

import pytest

from ebft.errors import ConfigError, RewardError
from ebft.reward_functions.processes import RewardWorkers, run_in_workers
from tests.reward_functions.functions import (
    always_ends,
    crashes_for_some,
    crashes_once,
    fails,
    generates,
    group_means,
    imported,
    one_too_few,
    process_ids,
    raises_mute,
    raises_odd,
    raises_own,
    raises_own_unpicklable,
    raises_timeout,
    slow_for_some,
    with_alarm,
)


@pytest.fixture
def workers():
    made = []

    def make(timeout=30.0):
        made.append(RewardWorkers(2, timeout, lambda: 2))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_groups_are_shared_among_processes_that_can_set_alarms(workers):
    pool = workers()
    columns = {"prompts": ["a", "a", "b", "b", "c", "c"], "completions": ["", "x", "xx", "xxx", "x" * 4, "x" * 5]}
    call = pool.parallel(with_alarm)
    assert call.__name__ == "with_alarm"
    extra = {"trainer_state": object(), "log_metric": lambda *_: None, "answer": [0, 10, 0, 10, 0, 10]}
    assert call(**columns, **extra) == [0, 11, 2, 13, 4, 15]
    assert pool.parallel(group_means)(**columns) == [0.5, 0.5, 2.5, 2.5, 4.5, 4.5]
    ids = pool.parallel(process_ids)(**columns)
    assert len(set(ids)) == 2 and os.getpid() not in ids
    assert pool.parallel(imported)(**columns) == [0.0] * 6, "a process of each CPU would import PyTorch"


def test_a_group_that_takes_too_long_has_no_reward(workers):
    call = workers(timeout=1.0).parallel(slow_for_some)
    assert call(prompts=["fast", "fast"]) == [1, 1]
    started = time.monotonic()
    with pytest.warns(UserWarning, match=r"slow_for_some took longer than 1 s \(reward_timeout\)"):
        assert call(prompts=["fast", "fast", "slow", "slow", "fast", "fast"]) == [1, 1, None, None, 1, 1]
    assert time.monotonic() - started < 45
    with warnings.catch_warnings(action="error"):  # warned once; the process has been replaced
        assert call(prompts=["slow", "slow", "fast", "fast"]) == [None, None, 1, 1]


def test_a_dead_process_is_replaced(workers, tmp_path):
    pool = workers()
    flag = str(tmp_path / "flag")
    assert pool.parallel(crashes_once)(prompts=["a", "a"], flag=[flag, flag]) == [3, 3]
    call = pool.parallel(crashes_for_some)
    with pytest.warns(UserWarning, match=r"crashes_for_some ended its process twice \(exit code 7\)"):
        assert call(prompts=["crash", "crash", "a", "a"]) == [None, None, 2, 2]


def test_a_function_whose_process_always_ends_is_an_error(workers):
    call = workers().parallel(always_ends)
    with pytest.warns(UserWarning, match=r"always_ends ended its process twice \(exit code 0\)"):
        assert call(prompts=["a"] * 4) == [None] * 4
    with pytest.raises(
        RewardError, match=r"functions.always_ends ended its process in each of its 8 calls so far \(exit"
    ):
        call(prompts=["a"] * 12)


def test_the_first_of_all_calls_may_crash(workers):
    with pytest.warns(UserWarning, match=r"crashes_for_some ended its process twice \(exit code 7\)"):
        assert workers().parallel(crashes_for_some)(prompts=["crash", "crash"]) == [None, None]


def test_functions_that_cannot_be_imported_are_an_error(workers, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "typed", typed := lambda **columns: [], raising=False)
    typed.__module__, typed.__qualname__ = "__main__", "typed"  # as in a notebook
    message = r'typed end with exit code 1 .*import it from __main__; .*if __name__ == "__main__":.*notebook'
    with pytest.raises(ConfigError, match=message):
        workers().parallel(typed)(prompts=["a", "a"])


def test_exceptions_and_wrong_lengths_are_raised(workers):
    pool = workers()
    with pytest.raises(ValueError, match="no such key in the row"):
        pool.parallel(fails)(prompts=["a", "a"])
    with pytest.raises(ValueError, match="one_too_few returned 1 rewards for 2 completions"):
        pool.parallel(one_too_few)(prompts=["a", "a"])


def test_what_runs_in_this_process(workers):
    async def judged(**columns): ...

    class Judge:
        def __call__(self, **columns): ...

    judge, pool = Judge(), workers()
    for function in ("some/reward-model", judged, judge):
        assert pool.parallel(function) is function
    assert run_in_workers([with_alarm, judge], 1, None, lambda: 2) == [with_alarm, judge]
    assert run_in_workers("some/reward-model", 4, None, lambda: 2) == "some/reward-model"
    with pytest.raises(ConfigError, match="reward_num_workers: .*<lambda> cannot be called in another process"):
        pool.parallel(lambda **columns: [])


def test_errors_of_functions_say_where():
    workers = RewardWorkers(1, 30.0, lambda: 2)
    try:
        given = {"prompts": ["a"] * 4}
        with pytest.raises(RewardError, match=r"raises_timeout failed: TimeoutError: the sandbox did not answer \("):
            workers.parallel(raises_timeout)(**given)
        with pytest.raises(RewardError, match=r"raises_odd failed: Odd: no answer \(.*functions.py, line \d+: "):
            workers.parallel(raises_odd)(**given)
        with pytest.raises(RewardError, match=r"raises_own failed: OwnError: no answer \(.*functions.py, line \d+: "):
            workers.parallel(raises_own)(**given)
        for function in (raises_own_unpicklable, raises_mute):
            with pytest.raises(RewardError, match=rf"{function.__name__} failed: .*\(.*functions.py, line \d+: "):
                workers.parallel(function)(**given)
        assert workers.parallel(generates)(**given) == [1.0] * 4
    finally:
        workers.close()


def test_a_script_without_a_guard_is_told_so(tmp_path):
    code = (
        "from ebft.reward_functions.processes import run_in_workers\n"
        "def zero(prompts, **columns): return [0.0] * len(prompts)\n"
        "[call] = run_in_workers([zero], 2, 30.0, lambda: 2)\n"
        "print(call(prompts=['a', 'a']))\n"
    )
    path = tmp_path / "script.py"
    path.write_text(code)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert ended.returncode and ended.stdout == ""
    assert "ConfigError: reward_num_workers: the processes for zero end with exit code 1" in ended.stderr
    assert ended.stderr.count("has imported the script, which starts training again. If training is started by") == 2
    assert "top level of a module" not in ended.stderr and ended.stderr.count("Traceback") == 1
    path.write_text(code.replace("[call]", "if __name__ == '__main__':\n  [call]").replace("print", "  print"))
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[0.0, 0.0]\n", ended.stderr
