"""Reward functions in worker processes: alarms, time limits, crashes, and what is refused."""

import json
import os
import signal
import time
import warnings

import pytest
from datasets import Dataset

from ebft.errors import ConfigError, RewardError
from ebft.structured import RolloutGRPOConfig, RolloutGRPOTrainer
from ebft.structured.reward_workers import RewardWorkers, run_in_chunks, run_in_workers
from tests.structured.conftest import chat_model
from tests.structured.trainers import arguments, rows


def with_alarm(completions, answer, **columns):
    """Only possible in the main thread of a process."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    return [float(len(text) + number) for text, number in zip(completions, answer)]


def process_ids(prompts, **columns):
    time.sleep(0.2)
    return [float(os.getpid())] * len(prompts)


def group_means(completions, **columns):
    return [sum(map(len, completions)) / len(completions)] * len(completions)


def slow_for_some(prompts, **columns):
    if prompts[0] == "slow":
        time.sleep(60)
    return [1.0] * len(prompts)


def crashes_for_some(prompts, **columns):
    if prompts[0] == "crash":
        os._exit(7)
    return [2.0] * len(prompts)


def crashes_once(prompts, flag, **columns):
    try:
        os.mkdir(flag[0])
    except FileExistsError:
        return [3.0] * len(prompts)
    os._exit(1)


def fails(prompts, **columns):
    raise ValueError("no such key in the row")


def one_too_few(prompts, **columns):
    return [1.0] * (len(prompts) - 1)


@pytest.fixture
def workers():
    made = []

    def make(timeout=30.0):
        made.append(RewardWorkers(2, timeout, lambda: 2))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_group_that_takes_too_long_has_no_reward(workers):
    call = workers(timeout=2.0).parallel(slow_for_some)
    assert call(prompts=["fast", "fast"]) == [1, 1]
    started = time.monotonic()
    with pytest.warns(UserWarning, match=r"slow_for_some took longer than 2 s \(reward_timeout\)"):
        assert call(prompts=["fast", "fast", "slow", "slow", "fast", "fast"]) == [1, 1, None, None, 1, 1]
    assert time.monotonic() - started < 45
    with warnings.catch_warnings(action="error"):  # warned once; the process has been replaced
        assert call(prompts=["slow", "slow", "fast", "fast"]) == [None, None, 1, 1]


@pytest.mark.slow
def test_a_dead_process_is_replaced(workers, tmp_path):
    pool = workers()
    flag = str(tmp_path / "flag")
    assert pool.parallel(crashes_once)(prompts=["a", "a"], flag=[flag, flag]) == [3, 3]
    call = pool.parallel(crashes_for_some)
    with pytest.warns(UserWarning, match=r"crashes_for_some ended its process twice \(exit code 7\)"):
        assert call(prompts=["crash", "crash", "a", "a"]) == [None, None, 2, 2]


@pytest.mark.slow
def test_processes_that_never_work_are_an_error(workers):
    with pytest.raises(ConfigError, match=r"crashes_for_some end with exit code 7 .*if __name__ == \"__main__\":"):
        workers().parallel(crashes_for_some)(prompts=["crash", "crash"])


@pytest.mark.slow
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


@pytest.mark.slow
def test_training_has_the_same_rewards_with_workers(chat_tokenizer, tmp_path):
    found = {}
    for count in (1, 2):
        dataset = Dataset.from_list([{**row, "answer": number} for number, row in enumerate(rows(multi_turn=False))])
        args = arguments(
            tmp_path / str(count), RolloutGRPOConfig, reward_num_workers=count, log_completions=True, max_steps=2
        )
        trainer = RolloutGRPOTrainer(
            chat_model(chat_tokenizer), [lengths], args, train_dataset=dataset, processing_class=chat_tokenizer
        )
        trainer.train()
        lines = (tmp_path / str(count) / "rollouts.jsonl").read_text().splitlines()
        found[count] = [json.loads(line) for line in lines]
    assert found[1] == found[2] and len(found[1]) == 6


def lengths(completions, answer, **columns):
    return [float(len(text[0]["content"]) + number) for text, number in zip(completions, answer)]


def relative_length(completions, **columns):
    """Above 0 for completions longer than the mean of all that the function is given."""
    lengths = [len(messages[0]["content"]) for messages in completions]
    return [length - sum(lengths) / len(lengths) for length in lengths]


@pytest.mark.parametrize(("groups", "sizes"), [(1, [4, 4, 4]), (2, [8, 4]), (5, [12])])
def test_functions_are_called_with_some_groups_at_a_time(groups, sizes):
    calls = []

    def noted(prompts, answer, log_metric, flag, **columns):
        assert flag == "one for all" and len(prompts) == len(answer)
        calls.append(len(prompts))
        log_metric("mean", sum(answer) / len(answer))
        return [float(value) for value in answer]

    [function] = run_in_chunks([noted], groups, lambda: 4)
    metrics = {}
    given = {"prompts": ["x"] * 12, "answer": list(range(12)), "log_metric": metrics.__setitem__}
    assert function(**given, flag="one for all") == list(range(12))
    assert calls == sizes and metrics == {"mean": pytest.approx(5.5)}


def test_chunks_with_a_wrong_number_of_rewards_are_an_error():
    function = run_in_chunks(one_too_few, 1, lambda: 4)
    with pytest.raises(ValueError, match="one_too_few returned 3 rewards for 4 completions"):
        function(prompts=["x"] * 8)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_number_of_groups_changes_what_is_trained(chat_tokenizer, tmp_path, groups):
    changes = {"streaming_partial_batch": True, "streaming_min_groups": groups, "max_steps": 1}
    trainer = RolloutGRPOTrainer(
        chat_model(chat_tokenizer),
        [relative_length],
        arguments(tmp_path, RolloutGRPOConfig, **changes),
        train_dataset=rows(multi_turn=False).remove_columns("ground_truth"),
        processing_class=chat_tokenizer,
    )
    trainer.train()
    sums = trainer.rewards.view(3, 4).sum(-1)
    assert (sums.abs().max() < 1e-3) == (groups == 1), "rewards are relative to the mean of their chunk"
    assert abs(sums.sum().item()) < 1e-3


class Odd(Exception):
    """Cannot be unpickled: it has more arguments than it passes on."""

    def __init__(self, first, second):
        super().__init__(first)


def raises_timeout(prompts, **columns):
    raise TimeoutError("the sandbox did not answer")


def raises_odd(prompts, **columns):
    raise Odd("no answer", 3)


def generates(prompts, **columns):
    yield from [1] * len(prompts)


@pytest.mark.slow
def test_errors_of_functions_say_where():
    workers = RewardWorkers(1, 30.0, lambda: 2)
    try:
        given = {"prompts": ["a"] * 4}
        with pytest.raises(RewardError, match=r"raises_timeout failed: TimeoutError: the sandbox did not answer \("):
            workers.parallel(raises_timeout)(**given)
        with pytest.raises(RewardError, match=r"raises_odd failed: Odd: no answer \(.*workers.py, line \d+: "):
            workers.parallel(raises_odd)(**given)
        assert workers.parallel(generates)(**given) == [1.0] * 4
    finally:
        workers.close()
