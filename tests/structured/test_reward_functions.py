"""Training with reward functions in worker processes, and with some prompt groups at a time."""

import json

import pytest

from ebft.structured import RolloutGRPOTrainer
from tests.reward_functions.functions import lengths
from tests.structured.conftest import chat_model
from tests.structured.trainers import rows

GRPO = {"kind": RolloutGRPOTrainer, "max_steps": 1}


def test_training_has_the_same_rewards_with_workers(chat_tokenizer, build, tmp_path):
    found, dataset = {}, rows(multi_turn=False).add_column("answer", list(range(12)))
    for count in (1, 2):
        options = {"reward_num_workers": count, "log_completions": True, "reward_funcs": [lengths], **GRPO}
        build(chat_model(chat_tokenizer), dataset, folder=tmp_path / str(count), **options).train()
        found[count] = list(map(json.loads, (tmp_path / str(count) / "rollouts.jsonl").read_text().splitlines()))
    assert found[1] == found[2] and len(found[1]) == 3


def relative_length(completions, **columns):
    """Above 0 for completions longer than the mean of all that the function is given."""
    lengths = [len(messages[0]["content"]) for messages in completions]
    return [length - sum(lengths) / len(lengths) for length in lengths]


@pytest.mark.parametrize("groups", [1, 3])
def test_the_number_of_groups_changes_what_is_trained(chat_tokenizer, build, groups):
    changes = {"streaming_partial_batch": True, "streaming_min_groups": groups, "reward_funcs": [relative_length]}
    dataset = rows(multi_turn=False).remove_columns("ground_truth")
    trainer = build(chat_model(chat_tokenizer), dataset, **changes, **GRPO)
    trainer.train()
    sums = trainer.rewards.view(3, 4).sum(-1)
    assert (sums.abs().max() < 1e-3) == (groups == 1), "rewards are relative to the mean of their chunk"
    assert abs(sums.sum().item()) < 1e-3
