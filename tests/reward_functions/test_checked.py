"""Checks of what reward functions return, in the process of training."""

import asyncio
from functools import partial

import pytest
from torch import nn

from ebft.errors import RewardError
from ebft.reward_functions.checked import checked_functions


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
        call = checked_functions([make(rewards)])[0]
        assert call(prompts=["a", "b"]) == [1.0, None]
    for rewards, message in (
        ([1.0, float("nan")], "returned nan for completion 1"),
        ({"a": 1, "b": 2}, "returned a dict"),
        ({0.5, 1.0}, "returned a set; it must return a list .* in their order"),
        (frozenset([0.5, 1.0]), "returned a frozenset"),
        ({0.5: "a", 1.0: "b"}.keys(), "returned a dict_keys"),
        (b"ab", "returned a bytes"),
        ([1.0], "returned 1 rewards for 2 completions"),
    ):
        with pytest.raises(RewardError, match=message):
            checked_functions(make(rewards))(prompts=["a", "b"])


def test_objects_whose_calls_are_coroutines():
    call = checked_functions(LaterJudge([1, 2]))
    assert asyncio.iscoroutinefunction(call) and asyncio.run(call(prompts=["a", "b"])) == [1.0, 2.0]
    with pytest.raises(RewardError, match="returned nan"):
        asyncio.run(checked_functions(LaterJudge([float("nan")]))(prompts=["a"]))


def test_each_function_has_a_name_for_logs():
    names = [call.__name__ for call in checked_functions([Judge([]), partial(given, rewards=[]), given])]
    assert names == ["Judge", "given", "given"]


def test_models_and_names_of_models_are_unchanged():
    model = nn.Linear(2, 1)
    assert checked_functions([model, "some/model"]) == [model, "some/model"]


def test_a_function_that_shortens_its_prompts_is_found_out():
    def consuming(prompts, **columns):
        return [1.0 for _ in range(len(prompts) - 1) if prompts.pop()]

    with pytest.raises(RewardError, match="returned 1 rewards for 2 completions"):
        checked_functions(consuming)(prompts=["a", "b"])
