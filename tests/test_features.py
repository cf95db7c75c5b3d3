"""Depths, normalisation and pooling, by hand."""

import os
from types import SimpleNamespace

import pytest
import torch

from ebft.features import FeatureNetwork, feature_depths, pool, token_features
from tests.strided.families import tiny_model


def test_depths_are_floors_of_fractions():
    assert feature_depths([0.0, 0.25, 0.5, 0.75, 1.0], 32) == [0, 8, 16, 24, 32]
    assert feature_depths([0.25, 0.75], 6) == [1, 4]


def test_each_depth_is_normalised_before_concatenation():
    features = token_features([torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, -2.0]])])
    torch.testing.assert_close(features, torch.tensor([[0.6, 0.8, 0.0, -1.0]]))


def test_pooling_by_hand():
    block = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 3.0], [4.0, 0.0]])
    torch.testing.assert_close(pool(block, "last_token"), torch.tensor([1.0, 0.0]))
    for method in ("mean_pooling", "completion_mean"):
        torch.testing.assert_close(pool(block, method), torch.tensor([5.0, 4.0]) / 41**0.5)
    # positions 4 // 4, 4 // 2, 3 * 4 // 4
    torch.testing.assert_close(pool(block, "concat"), torch.tensor([0.0, 1.0, 0.0, 3.0, 4.0, 0.0]) / 26**0.5)
    with pytest.raises(ValueError, match="invalid embed_method 'first'"):
        pool(block, "first")


def test_hidden_states_are_those_of_the_plain_model():
    model = tiny_model("gemma2").eval()
    ids = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True).hidden_states
    network = FeatureNetwork(model, [0.0, 0.5, 1.0], "last_token")
    found = network.hidden_states(lambda m: m.model(input_ids=ids, use_cache=False).last_hidden_state)
    for ours, theirs in zip(found, (expected[0], expected[2], expected[4])):
        torch.testing.assert_close(ours, theirs)
    assert len(model.model.layers) == len(network.causal_lm.model.layers) == 4  # taken out only while it ran


def test_the_copy_is_frozen_and_stays_as_it_was():
    model = tiny_model("llama").train()
    network = FeatureNetwork(model, [0.5], "last_token")
    assert not any(p.requires_grad for p in network.causal_lm.parameters()) and not network.causal_lm.training
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert network.causal_lm.lm_head.weight.norm() > 0


@pytest.mark.slow
def test_the_copy_has_the_weights_of_rank_0_where_only_that_loads_them(tmp_path):
    torch.multiprocessing.spawn(loaded_by_rank_0, (str(tmp_path / "store"),), nprocs=2)


def loaded_by_rank_0(rank: int, store: str) -> None:
    """As under FSDP with cpu_ram_efficient_loading: the weights of other ranks are zeros until training starts."""
    os.environ |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "ACCELERATE_USE_CPU": "true"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", world_size=2, rank=rank)
    loaded, model = tiny_model("llama"), tiny_model("llama")
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    network = FeatureNetwork(model, [0.5], "last_token")
    for ours, theirs in zip(network.causal_lm.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs) and not ours.requires_grad
    assert rank == 0 or all(not parameter.any() for parameter in model.parameters())
    torch.distributed.destroy_process_group()


def test_a_copy_follows_the_policy_to_its_device(monkeypatch):
    policy = tiny_model("llama")
    network, fixed = FeatureNetwork(policy, [1.0], "last_token"), FeatureNetwork(policy, [1.0], "last_token", "cpu")
    moved = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 0))]))
    for one in (network, fixed):
        calls = []
        monkeypatch.setattr(one.causal_lm, "to", calls.append)
        if one is network:
            assert one._followed() is policy
            monkeypatch.setattr(one, "_followed", lambda: moved)
        assert one.device == torch.device("cpu") and calls == ([torch.device("cuda", 0)] if one is network else [])
