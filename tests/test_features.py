"""Depths, normalisation and pooling, by hand."""

import copy
import os
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

from ebft.config.options import EmbedMethod
from ebft.errors import ModelError
from ebft.features import POOLING, FeatureNetwork
from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from ebft.structured.reward import FeatureMatchingReward, embed_continuations
from tests.strided import oracle
from tests.strided.families import tiny_model
from tests.strided.test_exactness import BASE, ENDS, compare, unequal_batch
from tests.structured.conftest import make_chat_tokenizer
from tests.structured.oracle import embedding


def test_each_pooling_method_that_options_declare_is_in_the_table():
    assert tuple(POOLING) == get_args(EmbedMethod)


def test_a_given_network_is_used_as_it_is_and_follows_the_policy():
    policy, other = tiny_model("llama"), tiny_model("gemma2")
    adapted = get_peft_model(other, LoraConfig(target_modules="all-linear"))
    network = FeatureNetwork(policy, [0.5], "last_token", network=adapted)
    assert network.causal_lm is other and not network.shares_weights and network._followed() is policy
    with network.frozen():
        assert not any(layer.disable_adapters for layer in other.modules() if isinstance(layer, BaseTunerLayer))


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


def of_strided(policy, other, tmp_path):
    policy.generation_config.eos_token_id = ENDS
    args = StridedEBFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], **BASE)
    return StridedEBFTTrainer(policy, args, feature_network=other)


def of_structured(policy, other, tokenizer):
    return FeatureMatchingReward(policy, tokenizer, 2, feature_layers=[0.5], feature_network=other)


def test_features_of_another_architecture(monkeypatch, tmp_path):
    policy, other = tiny_model("llama"), tiny_model("gemma2").eval()
    trainer = of_strided(copy.deepcopy(policy), copy.deepcopy(other), tmp_path)
    feature = oracle.block_feature
    monkeypatch.setattr(oracle, "block_feature", lambda model, *rest: feature(other, *rest))
    compare(trainer, policy, *unequal_batch())
    reward = of_structured(policy, copy.deepcopy(other), make_chat_tokenizer())
    phi = embed_continuations(reward.network, [5, 6, 7], [[8, 9], [10]])
    for ours, ids in zip(phi, ([8, 9], [10])):
        expected = embedding(other, [5, 6, 7], ids, [0.5], "last_token")
        torch.testing.assert_close(ours, expected.float(), atol=1e-5, rtol=0)


def test_a_network_that_differs_from_its_plain_model_is_refused(tmp_path):
    def by_kernel(module, inputs, output):  # as a model that looks at the number of tokens of the pass
        states = output[0] if isinstance(output, tuple) else output
        changed = states + 0.5 * states.roll(1, -1) * (states.shape[1] % 5)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    other = tiny_model("llama")
    other.model.layers[0].register_forward_hook(by_kernel)
    with pytest.raises(ModelError, match="LlamaForCausalLM: strided hidden states differ"):
        of_strided(tiny_model("gemma2"), other, tmp_path)
    with pytest.raises(ModelError, match="LlamaForCausalLM: features with shared prompts differ"):
        of_structured(tiny_model("gemma2"), other, make_chat_tokenizer())
    with pytest.raises(ModelError, match="feature_network knows 7 tokens"):
        of_strided(tiny_model("gemma2"), tiny_model("llama", vocab_size=7), tmp_path)


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
