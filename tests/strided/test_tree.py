"""Trees of rollouts, by hand and beside a naive dictionary of beginnings."""

import itertools

import pytest
import torch

from ebft.strided.passes import RolloutTree

# Two blocks of three rollouts with three tokens.
ROLLOUTS = torch.tensor([[[5, 5, 7], [5, 5, 8], [4, 5, 7]], [[5, 6, 7], [5, 6, 7], [5, 6, 1]]])


def test_nodes_by_hand():
    nodes = RolloutTree.of(ROLLOUTS, merge=True).nodes(3)
    #                        first tokens | second   | third
    assert nodes.tokens.tolist() == [4, 5, 5, 5, 5, 6, 7, 7, 8, 1, 7]
    assert nodes.block.tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1]
    assert nodes.step.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert nodes.path.tolist() == [
        *([0, 0, 0], [1, 1, 1], [2, 2, 2]),
        *([0, 3, 3], [1, 4, 4], [2, 5, 5]),
        *([0, 3, 6], [1, 4, 7], [1, 4, 8], [2, 5, 9], [2, 5, 10]),
    ]
    assert nodes.of_rollouts.tolist() == [[[1, 4, 7], [1, 4, 8], [0, 3, 6]], [[2, 5, 10], [2, 5, 10], [2, 5, 9]]]
    assert nodes.by_block.tolist() == [0, 1, 3, 4, 6, 7, 8, 2, 5, 9, 10]
    assert nodes.by_block[nodes.rank].tolist() == list(range(11))


def test_draws_by_hand():
    tree = RolloutTree.of(ROLLOUTS, merge=True)
    draws = tree.all_draws()
    # Rows are the two blocks, the three first tokens and the three beginnings of two tokens.
    assert draws.shape == (8, 3)
    assert draws.row.tolist() == [0, 0, 0, 1, 1, 1, 3, 3, 2, 4, 4, 4, 6, 6, 5, 7, 7, 7]
    assert draws.column.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0, 0, 1, 2, 0, 1, 0, 0, 1, 2]
    spread = draws.spread(ROLLOUTS.movedim(-1, 0).flatten())
    assert spread.tolist() == [
        *([5, 5, 4], [5, 5, 5]),
        *([5, 5, 5], [5, 5, 5], [6, 6, 6]),  # a column without a rollout repeats the first
        *([7, 7, 7], [7, 8, 7], [7, 7, 1]),
    ]
    assert draws.collect(spread).view(3, 2, 3).movedim(0, -1).equal(ROLLOUTS)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_every_rollout_is_a_path(merge, steps):
    generator = torch.Generator().manual_seed(steps)
    rollouts = torch.randint(3, (5, 4, steps), generator=generator)
    tree = RolloutTree(5, 4, merge, rollouts.device)
    for of_step in rollouts.unbind(-1):
        draws = tree.draws()
        assert draws.collect(draws.spread(of_step.flatten())).equal(of_step.flatten())
        tree.grow(of_step.flatten())
    nodes = tree.nodes(steps)
    beginnings = {}
    for block, sample in itertools.product(range(5), range(4)):
        for step in range(steps):
            node = nodes.of_rollouts[block, sample, step].item()
            beginning = tuple(rollouts[block, sample, : step + 1].tolist())
            assert (nodes.block[node], nodes.step[node]) == (block, step)
            assert tuple(nodes.tokens[nodes.path[node, : step + 1]].tolist()) == beginning
            assert nodes.path[node, step:].eq(node).all()
            key = (block, beginning) if merge else (block, sample, beginning)
            assert beginnings.setdefault(key, node) == node
    assert sorted(beginnings.values()) == list(range(len(nodes.tokens)))
    if merge and steps == 4:
        assert len(nodes.tokens) < 5 * 4 * 4


def test_large_token_ids_are_kept():
    rollouts = torch.tensor([[[2**31 + 5], [2**31 + 5], [0]]])
    assert RolloutTree.of(rollouts, merge=True).nodes(1).tokens.tolist() == [0, 2**31 + 5]
