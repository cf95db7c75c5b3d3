"""Estimators of advantages in structured mode: several rewards, their scale, and what is logged."""

import pytest
import torch

from ebft import EBFTConfig, EBFTTrainer
from ebft.errors import ConfigError
from tests.structured import oracle
from tests.structured.conftest import chat_model, lora
from tests.structured.trainers import arguments, make, one_step, rows


def short(completion_ids, **columns):
    """Some completions have no reward."""
    return [None if len(ids) % 3 == 0 else -float(len(ids)) for ids in completion_ids]


def advantages_of(trainer, batches):
    """Advantages of the last step's completions in the order in which they were sampled."""
    rows_of = torch.cat([batch["row"] for batch in batches])
    return torch.cat([batch["advantages"] for batch in batches])[rows_of.argsort()]


@pytest.mark.parametrize("scale_rewards", [None, "batch", True])
@pytest.mark.parametrize("estimator", ["rloo", "reinforce"])
def test_rewards_are_weighted_and_scaled(chat_tokenizer, tmp_path, estimator, scale_rewards):
    args = arguments(
        tmp_path,
        advantage_estimator=estimator,
        scale_rewards=scale_rewards,
        reward_weights=[0.5, 2.0],
        diversity_coef=0.7,
        log_completions=True,
    )
    trainer = EBFTTrainer(
        lora(chat_model(chat_tokenizer)),
        args,
        reward_funcs=[short],
        train_dataset=rows(),
        processing_class=chat_tokenizer,
    )
    *_, rollouts, _ = one_step(trainer)
    match = trainer.feature_reward.last
    others = torch.tensor([reward or 0.0 for reward in short([rollout.ids for rollout in rollouts])]).view(-1, 4)
    assert (others == 0).any()
    own = 0.5 * (match.alignment - 0.7 * match.diversity)
    rewards = own + 2.0 * others
    wanted = []
    for gram, total in zip(match.samples @ match.samples.mT, rewards):
        pairs = [[0.5 * 0.7 * 2 / 3 * gram[j, k] * (j != k) for k in range(4)] for j in range(4)]
        wanted.append(oracle.advantages_of(total + torch.tensor([sum(row) for row in pairs]), pairs, estimator))
    wanted = torch.stack(wanted)
    if scale_rewards == "batch":
        wanted = wanted / (rewards.std() + 1e-4)
    if scale_rewards is True:
        wanted = wanted / (rewards.std(-1, keepdim=True) + 1e-4)
    found = advantages_of(trainer, trainer.generation_batch)
    torch.testing.assert_close(found, wanted.flatten(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])), found)


def test_group_norm_is_what_trl_computes(chat_tokenizer, tmp_path):
    trainer = make(lora(chat_model(chat_tokenizer)), chat_tokenizer, tmp_path, advantage_estimator="grpo")
    assert trainer.args.advantage_estimator == "group_norm" and trainer.scale_rewards == "group"
    one_step(trainer)
    wanted = [oracle.advantages_of(total, [[0.0]] * 4, "group_norm") for total in trainer.feature_reward.last.rewards]
    found = advantages_of(trainer, trainer.generation_batch)
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-5, rtol=1e-4)


def test_gdpo_has_its_own_formula(tmp_path):
    given = {"output_dir": str(tmp_path), "multi_objective_aggregation": "normalize_then_sum"}
    with pytest.raises(ConfigError, match="excludes advantage_estimator: rloo. Set advantage_estimator: group_norm"):
        EBFTConfig(**given)
    EBFTConfig(**given, advantage_estimator="group_norm")
