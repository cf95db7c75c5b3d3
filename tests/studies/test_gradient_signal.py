"""The share of signal in gradients: without bias, and on the losses that training has."""

import itertools

import gradient_signal
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ebft.config.options import StridedOptions
from ebft.data.batches import DocumentCollator
from ebft.features import FeatureNetwork
from ebft.prefix.forward import prepare


def test_product_is_the_mean_over_pairs_of_different_batches():
    torch.manual_seed(0)
    a, b = torch.randn(5, 7), torch.randn(5, 7)
    pairs = [(a[i] @ b[j]).item() for i, j in itertools.permutations(range(5), 2)]
    assert gradient_signal.unbiased_product(a, b) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)


def test_share_of_signal_of_a_known_mixture():
    torch.manual_seed(0)
    signal, noise = torch.ones(400), torch.randn(200, 400)
    cross_entropy = signal + torch.randn(200, 400)
    gradients = {"g": 0.5 * signal + noise, gradient_signal.CROSS_ENTROPY: cross_entropy}
    found = gradient_signal.statistics(gradients, "g")
    assert found["share_of_signal"] == pytest.approx(0.25 / 1.25, abs=0.02)
    assert found["cosine_with_cross_entropy"] == pytest.approx(1, abs=0.05)
    assert found["norm"] == pytest.approx((1.25 * 400) ** 0.5, rel=0.02)


def test_every_reward_has_a_gradient_on_the_same_rollouts(tiny_llama_dir):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    names = ["q_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM"))
    network = FeatureNetwork(model, [0.25, 0.5, 0.75], "mean_pooling")
    prepare(model)
    parameters = gradient_signal.last_third(model)
    assert 0 < len(parameters) < sum("lora_B" in name for name, _ in model.named_parameters())
    rows = [
        {"input_ids": list(range(10, 10 + n)), "labels": [-100] * 3 + list(range(13, 10 + n)), "prompt_length": 3}
        for n in (21, 30)
    ]
    options = StridedOptions(stride=4, context_length=3, generate_max_len=4, n_samples_per_prompt=4, temperature=1.0)
    found = gradient_signal.losses(model, network, DocumentCollator(0)(rows), options)
    assert set(found) == {gradient_signal.CROSS_ENTROPY, *gradient_signal.REWARDS}
    norms = {}
    for name, loss in found.items():
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        norms[name] = torch.cat([part.flatten() for part in gradients]).norm().item()
    assert all(norm > 0 for norm in norms.values())
    assert len(set(norms.values())) == len(norms)  # no two rewards are the same
