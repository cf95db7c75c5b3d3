"""Depths, normalisation and pooling, by hand."""

import os
from types import SimpleNamespace

import pytest
import torch

from ebft.features import FeatureNetwork
from tests.strided.families import tiny_model


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


def test_the_copy_is_frozen_stays_as_it_was_and_follows_the_policy_to_its_device(monkeypatch):
    policy = tiny_model("llama").train()
    network, fixed = FeatureNetwork(policy, [0.5], "last_token"), FeatureNetwork(policy, [1.0], "last_token", "cpu")
    assert not any(p.requires_grad for p in network.causal_lm.parameters()) and not network.causal_lm.training
    with torch.no_grad():
        policy.lm_head.weight.zero_()
    assert network.causal_lm.lm_head.weight.norm() > 0 and network._followed() is policy
    gpu = torch.device("cuda", 0)
    moved = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=gpu)]))
    monkeypatch.setattr(network, "_followed", lambda: moved)
    for one, expected in ((network, [gpu]), (fixed, [])):
        calls = []
        monkeypatch.setattr(one.causal_lm, "to", calls.append)
        assert one.device == torch.device("cpu") and calls == expected


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
