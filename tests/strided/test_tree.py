"""Trees of rollouts beside a naive dictionary of beginnings."""

import itertools

import pytest
import torch

from ebft.strided.passes import RolloutTree


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_every_rollout_is_a_path(merge, steps):
    generator = torch.Generator().manual_seed(steps)
    rollouts = torch.tensor([0, 7, 2**31 + 5])[torch.randint(3, (5, 4, steps), generator=generator)]
    tree = RolloutTree(5, 4, merge, rollouts.device)
    for of_step in rollouts.unbind(-1):
        draws = tree.draws()
        assert draws.collect(draws.spread(of_step.flatten())).equal(of_step.flatten())
        tree.grow(of_step.flatten())
    if steps:
        draws, drawn = tree.all_draws(), rollouts.movedim(-1, 0).flatten()
        assert draws.collect(draws.spread(drawn)).equal(drawn)
        # From the blocks and all nodes but the last.
        assert draws.shape[0] == 5 + sum(len(level.tokens) for level in tree.levels[:-1])
    nodes = tree.nodes(steps)
    assert nodes.block[nodes.by_block].equal(nodes.block.sort().values)
    assert nodes.by_block[nodes.rank].equal(torch.arange(len(nodes.tokens)))
    beginnings = {}
    for block, sample, step in itertools.product(range(5), range(4), range(steps)):
        node = nodes.of_rollouts[block, sample, step].item()
        beginning = tuple(rollouts[block, sample, : step + 1].tolist())
        assert (nodes.block[node], nodes.step[node]) == (block, step)
        assert tuple(nodes.tokens[nodes.path[node, : step + 1]].tolist()) == beginning
        assert nodes.path[node, step:].eq(node).all()
        key = (block, beginning) if merge else (block, sample, beginning)
        assert beginnings.setdefault(key, node) == node
    assert sorted(beginnings.values()) == list(range(len(nodes.tokens)))
    assert not (merge and steps == 4) or len(nodes.tokens) < 5 * 4 * 4
