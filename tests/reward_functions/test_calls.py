"""Calls of reward functions in the process of training: checks of what they return, and some groups at a time."""

import asyncio
import copy
from collections import deque
from functools import partial

import pytest

from ebft.errors import RewardError
from ebft.reward_functions import _own, checked_reward, in_chunks


class Judge:
    """A callable object that returns the same rewards for all prompts."""

    def __init__(self, rewards):
        self.rewards = rewards

    def __call__(self, prompts, **columns):
        return self.rewards


class LaterJudge(Judge):
    async def __call__(self, prompts, **columns):
        return self.rewards


def given(prompts, rewards, **columns):
    return rewards


@pytest.mark.parametrize("make", [Judge, lambda rewards: partial(given, rewards=rewards)], ids=["object", "partial"])
def test_rewards_of_callable_objects_are_checked(make):
    for rewards in ([1, None], (1, None), iter([1, None]), {"a": 1, "b": None}.values()):
        call = checked_reward(make(rewards))
        assert call(prompts=["a", "b"]) == [1.0, None]
    for rewards, message in (
        ([1.0, float("nan")], "returned nan for completion 1"),
        ([-1e39, 1.0], "returned -1e\\+39 for completion 0"),
        ({0.5, 1.0}, "returned a set; it must return a list in the completions' order"),
        ({0.5: "a", 1.0: "b"}.keys(), "returned a dict_keys"),
        ([1.0], "returned 1 rewards for 2 completions"),
    ):
        with pytest.raises(RewardError, match=message):
            checked_reward(make(rewards))(prompts=["a", "b"])


def test_objects_whose_calls_are_coroutines():
    call = checked_reward(LaterJudge([1, 2]))
    assert asyncio.iscoroutinefunction(call) and asyncio.run(call(prompts=["a", "b"])) == [1.0, 2.0]
    with pytest.raises(RewardError, match="returned nan"):
        asyncio.run(checked_reward(LaterJudge([float("nan")]))(prompts=["a"]))


def test_each_function_gets_its_own_lists():
    def changes(prompts, completions, completion_ids, meta, environments, **columns):
        prompts[0][0]["content"] = completions[0][0]["content"] = "changed"
        prompts.pop(), completion_ids[0].clear(), meta[0]["tests"].append("x"), environments[0].append(1)
        return [1.0, 2.0]

    message = lambda: [{"role": "user", "content": "a"}]
    given = {"prompts": [message(), message()], "completions": [message(), message()], "completion_ids": [[1, 2], [3]]}
    given |= {"meta": [{"tests": ["t"], "n": None}, {"tests": [], "n": 1}]}
    floats = [0.5] * 3
    assert _own([floats])[0] == floats and _own([floats])[0] is not floats
    before, environments = copy.deepcopy(given), [deque(), deque()]
    assert checked_reward(changes)(**given, environments=environments) == [1.0, 2.0]
    assert given == before and environments[0] == deque([1]), "objects are the user's own"


@pytest.mark.parametrize(("groups", "sizes"), [(1, [4, 4, 4]), (2, [8, 4]), (5, [12])])
def test_functions_are_called_with_some_groups_at_a_time(groups, sizes):
    calls = []

    def noted(prompts, answer, log_metric, flag, **columns):
        assert flag == "one for all" and len(prompts) == len(answer)
        calls.append(len(prompts))
        log_metric("mean", sum(answer) / len(answer))
        return [float(value) for value in answer]

    function = in_chunks(noted, groups, lambda: 4)
    metrics = {}
    given = {"prompts": ["x"] * 12, "answer": list(range(12)), "log_metric": metrics.__setitem__}
    assert function(**given, flag="one for all") == list(range(12))
    assert calls == sizes and metrics == {"mean": pytest.approx(5.5)}
