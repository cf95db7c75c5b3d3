"""Training with reward functions in worker processes, and with some prompt groups at a time."""

import json

import pytest
from datasets import Dataset

from ebft.structured import RolloutGRPOConfig, RolloutGRPOTrainer
from tests.reward_functions.functions import lengths
from tests.structured.conftest import chat_model
from tests.structured.trainers import arguments, rows


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


def relative_length(completions, **columns):
    """Above 0 for completions longer than the mean of all that the function is given."""
    lengths = [len(messages[0]["content"]) for messages in completions]
    return [length - sum(lengths) / len(lengths) for length in lengths]


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
