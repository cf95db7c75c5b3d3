"""Estimators of advantages in structured mode: several rewards, their scale, and what is logged."""

import pytest
import torch

from ebft import EBFTConfig
from ebft.errors import ConfigError
from tests.structured import oracle
from tests.structured.trainers import one_step


def short(completion_ids, **columns):
    """Some completions have no reward."""
    return [None if len(ids) % 3 == 0 else -float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("scale_rewards", [None, "batch", True])
@pytest.mark.parametrize("estimator", ["rloo", "reinforce"])
def test_rewards_are_weighted_and_scaled(build, estimator, scale_rewards):
    options = {"advantage_estimator": estimator, "scale_rewards": scale_rewards, "reward_weights": [0.5, 2.0]}
    trainer = build(**options, diversity_coef=0.7, log_completions=True, reward_funcs=[short])
    *_, rollouts, _ = one_step(trainer)
    match = trainer.feature_reward.last
    others = torch.tensor([reward or 0.0 for reward in short([rollout.ids for rollout in rollouts])]).view(-1, 4)
    assert (others == 0).any()
    rewards = 0.5 * (match.alignment - 0.7 * match.diversity) + 2.0 * others
    wanted = []
    for gram, total in zip(match.samples @ match.samples.mT, rewards):
        pairs = [[0.5 * 0.7 * 2 / 3 * gram[j, k] * (j != k) for k in range(4)] for j in range(4)]
        wanted.append(oracle.advantages_of(total + torch.tensor([sum(row) for row in pairs]), pairs, estimator))
    wanted = torch.stack(wanted)
    if scale_rewards is not None:
        wanted = wanted / ((rewards.std() if scale_rewards == "batch" else rewards.std(-1, keepdim=True)) + 1e-4)
    # In the order in which they were sampled.
    order = torch.cat([batch["row"] for batch in trainer.generation_batch]).argsort()
    found = torch.cat([batch["advantages"] for batch in trainer.generation_batch])[order]
    torch.testing.assert_close(found, wanted.flatten(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])), found)


def test_gdpo_has_its_own_formula(tmp_path):
    given = {"output_dir": str(tmp_path), "multi_objective_aggregation": "normalize_then_sum"}
    with pytest.raises(ConfigError, match="excludes advantage_estimator: rloo. Set advantage_estimator: group_norm"):
        EBFTConfig(**given)
    EBFTConfig(**given, advantage_estimator="group_norm")
    args = EBFTConfig(output_dir=str(tmp_path), advantage_estimator="grpo")
    assert args.advantage_estimator == "group_norm" and args.scale_rewards == "group"
