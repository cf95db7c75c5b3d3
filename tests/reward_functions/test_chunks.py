"""Reward functions that are called with some prompt groups at a time."""

import pytest

from ebft.reward_functions.calls import run_in_chunks
from tests.reward_functions.functions import one_too_few


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
