"""The replay buffer and prompts that are sampled again: what is trained on, and with which log-probabilities."""

import pytest
import torch
from datasets import Dataset

from ebft.errors import ConfigError
from ebft.structured import RolloutGRPOTrainer
from ebft.structured.replay import FailedPrompts, PromptReuse, ReplayBuffer
from tests.structured import conftest, oracle, trainers

PAD = 99


def batch(lengths, advantages, first=1, **more):
    """Groups of two; completions of the given lengths, all after a prompt as long as the first is."""
    ids = [torch.arange(first + 10 * row, first + 10 * row + length) for row, length in enumerate(lengths)]
    prompts = [torch.full((lengths[0],), row) for row in range(len(lengths))]
    stack = torch.nn.utils.rnn.pad_sequence
    return {
        "prompt_ids": torch.stack(prompts),
        "prompt_mask": torch.ones(len(lengths), lengths[0], dtype=torch.long),
        "completion_ids": stack(ids, batch_first=True, padding_value=PAD),
        "completion_mask": stack([torch.ones_like(x) for x in ids], batch_first=True),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(sum(lengths)),
        **more,
    }


def real(inputs, row):
    """A row without its padding."""
    parts = []
    for part in ("prompt", "completion"):
        mask, ids = inputs[f"{part}_mask"][row].bool(), inputs[f"{part}_ids"][row]
        assert (ids[~mask] == PAD).all()
        parts.append(ids[mask].tolist())
    return parts


def test_groups_without_a_signal_are_replaced_by_stored_ones():
    buffer = ReplayBuffer(2, 2, PAD, seed=0)
    first = batch([3, 5, 2, 2], [1.0, -1.0, 0.0, 0.0])
    assert buffer.replace(first) == (first, [])  # nothing is stored yet
    second = batch([2, 1, 4, 2, 1, 1], [0.0, 0.0, 0.5, -0.5, 0.0, 0.0], first=100)
    found, rows = buffer.replace(second)
    assert rows == [0, 1]  # one group was stored, and is used once
    assert [real(found, row) for row in (0, 1)] == [real(first, row) for row in (0, 1)]
    assert [real(found, row) for row in (2, 3, 4, 5)] == [real(second, row) for row in (2, 3, 4, 5)]
    assert found["advantages"].tolist() == [1.0, -1.0, 0.5, -0.5, 0.0, 0.0]
    assert found["prompt_mask"][0].tolist() == [1, 1, 1] and found["prompt_mask"][2].tolist() == [0, 1, 1]
    buffer.replace(batch([1, 1], [2.0, -2.0], first=200))  # the oldest of three is dropped
    third, rows = buffer.replace(batch([1, 1] * 3, [0.0, 0.0] * 3, first=300))
    assert rows == [0, 1, 2, 3]
    stored = sorted(third["advantages"].tolist())
    assert stored == [-2.0, -0.5, 0.0, 0.0, 0.5, 2.0]


def test_given_tokens_stay_given():
    buffer = ReplayBuffer(4, 2, PAD, seed=0)
    given = torch.tensor([[1, 0, 1], [1, 1, 1]])
    buffer.replace(batch([3, 3], [1.0, -1.0], tool_mask=given))
    found, _ = buffer.replace(batch([2, 1, 2, 2], [0.0, 0.0, 1.0, -1.0], first=100))
    assert found["tool_mask"].tolist() == [[1, 0, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]]
    buffer = ReplayBuffer(4, 2, PAD, seed=0)
    buffer.replace(batch([2, 1], [1.0, -1.0]))
    found, _ = buffer.replace(batch([3, 3], [0.0, 0.0], tool_mask=given))
    assert found["tool_mask"].tolist() == [[1, 1], [1, 0]]


def rewarded(prompts, completion_ids, trainer_state, **columns):
    """A signal in the first step only."""
    return [float(sum(ids) % 5) if trainer_state.global_step == 0 else 0.0 for ids in completion_ids]


@pytest.fixture
def train(chat_tokenizer, build):
    def trained(reward=rewarded, **changes):
        dataset = Dataset.from_list([{"prompt": [trainers.USER(f"say {i} " + "word " * (i % 4))]} for i in range(12)])
        torch.manual_seed(3)
        options = {"kind": RolloutGRPOTrainer, "reward_funcs": reward, "learning_rate": 0.05, **changes}
        trainer = build(conftest.chat_model(chat_tokenizer), dataset, **options)
        weights = lambda: {name: value.clone() for name, value in trainer.model.state_dict().items()}
        batches, models, after_inputs = [], [], trainer.after_inputs

        def kept(rows, inputs):
            models.append(weights())
            batches.append((inputs, after_inputs(rows, inputs)))
            return batches[-1][1]

        trainer.after_inputs = kept
        trainer.train()
        return trainer, batches, [*models, weights()]

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_replayed_groups_are_trained_on(chat_tokenizer, train, recompute, num_iterations):
    options = {"replay_recompute_logps": recompute, "num_iterations": num_iterations, "max_steps": 2 * num_iterations}
    trainer, batches, models = train(replay_buffer_size=8, **options)
    (first, trained), (second, replayed) = batches
    assert trained["completion_ids"] is first["completion_ids"] and not second["advantages"].any()
    assert replayed["advantages"].any()
    assert any(not torch.equal(models[1][name], models[2][name]) for name in models[1])  # the second step trains
    assert replayed["num_items_in_batch"] == replayed["completion_mask"].sum()
    assert trainers.logged(trainer, "replayed_groups") == [0, 3]
    assert ("old_per_token_logps" in replayed) == (num_iterations == 2 or not recompute)
    if "old_per_token_logps" not in replayed:
        return
    model = conftest.chat_model(chat_tokenizer).eval()
    model.load_state_dict(models[1] if recompute else models[0])  # now, or when they were sampled
    for row in range(len(replayed["advantages"])):
        prompt = replayed["prompt_ids"][row][replayed["prompt_mask"][row].bool()].tolist()
        completion = replayed["completion_ids"][row][replayed["completion_mask"][row].bool()].tolist()
        with torch.no_grad():
            wanted = oracle.token_logps(model, prompt, completion, trainer.args.temperature)
        found = replayed["old_per_token_logps"][row][: len(completion)]
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-3)


def test_failed_prompts_take_the_place_of_others_oldest_first():
    failed = FailedPrompts(max_groups=2, group_size=2)
    rows = [{"prompt": name} for name in "aabbccdd"]
    failed.add(rows, [0.0, 0.0, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0])  # all but b
    later = [{"prompt": name} for name in "xxyyzz"]
    assert failed.inject(later) == 2
    assert "".join(row["prompt"] for row in later) == "xxaacc"
    later = [{"prompt": name} for name in "xx"]
    assert failed.inject(later) == 1 and later[0]["prompt"] == "d"
    assert failed.inject(later) == 0
    # Batches that were read ahead, of which the first is trained on before a checkpoint
    failed.begin()
    state = failed.state()
    assert [row["prompt"] for row in state] == ["d"]
    resumed = FailedPrompts(max_groups=2, group_size=2)
    resumed.restore(state)
    assert resumed.inject(later) == 1 and later[0]["prompt"] == "d"


@pytest.mark.parametrize(("fraction", "again"), [(0.5, True), (1.0, False)])
def test_failed_prompts_are_sampled_again(chat_tokenizer, train, fraction, again):
    options = {"reroll_start_fraction": fraction, "reroll_max_groups": 2, "max_steps": 4, "log_completions": True}
    reward = lambda prompts, **columns: [0.0 if "word" in prompt[0]["content"] else 1.0 for prompt in prompts]
    trainer, batches, _ = train(reward, **options)
    seen = [
        [chat_tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(x["prompt_ids"][::4], x["prompt_mask"][::4])]
        for x, _ in batches
    ]
    failed = [prompt for prompt in seen[0] + seen[1] if "word" in prompt]
    assert failed and len(set(seen[0] + seen[1])) == 6
    repeated = [prompt for prompt in seen[2] + seen[3] if prompt in failed]
    assert repeated == (failed[: len(repeated)] if again else []) and bool(repeated) == again
    groups = trainers.logged(trainer, "rerolled_groups")
    assert (sum(groups) == len(repeated) > 0) if again else groups == []


@pytest.mark.parametrize("option", [{"replay_buffer_size": 4}, {"reroll_start_fraction": 0.5}])
def test_groups_that_are_spread_over_processes_cannot_be_replaced(chat_tokenizer, build, option):
    trainer = build(conftest.chat_model(chat_tokenizer), kind=RolloutGRPOTrainer, reward_funcs=rewarded, **option)
    trainer.args.steps_per_generation, trainer.args.per_device_train_batch_size = 1, 2  # as with two processes
    with pytest.raises(ConfigError, match=r"steps_per_generation \(2\) must be a multiple of num_generations \(4\)"):
        PromptReuse(trainer)
