"""Variants of LoRA in a strided step, against the naive oracle: values and gradients."""

from contextlib import nullcontext

import pytest
import torch
from peft import AdaLoraConfig, C3AConfig, GraloraConfig, HRAConfig, get_peft_model

from ebft.models.adapter import freeze_except
from tests.strided.families import tiny_model
from tests.strided.test_exactness import checkpointing, exact, make_trainer, unequal_batch
from tests.structured.conftest import lora

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SOME = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 3], "layers_pattern": "layers"}
VARIANTS = {
    "rank-stabilised scaling": ("llama", {"use_rslora": True}),
    "dora": ("llama", {"use_dora": True}),
    "dora with transposed weights": ("gpt2", {"use_dora": True, "fan_in_fan_out": True}),
    "some layers": ("llama", SOME),
    "gaussian initialisation": ("llama", {"init_lora_weights": "gaussian"}),
    "fused experts": ("qwen3_moe", {"target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS}),
    "fused experts alone": ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS}),
    "fused experts of mixtral": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]}),
}
# The same result with the pass that keeps activations, and with passes that recompute them.
MEMORY = {"one pass": {}, "checkpointing": {"rollout_tokens_per_pass": 24, **checkpointing(True)}}
CASES = [*((name, "one pass") for name in VARIANTS), ("dora", "checkpointing"),
         ("fused experts alone", "checkpointing")]  # fmt: skip


def with_adapter(model, **settings):
    """A model with an adapter whose weights are not at their initial values."""
    model = lora(model, **settings)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(1.3)
    return model


@pytest.mark.first(3)
@pytest.mark.parametrize(("variant", "memory"), CASES)
def test_a_variant_of_lora_is_exact(variant, memory, tmp_path):
    family, settings = VARIANTS[variant]
    model = with_adapter(tiny_model(family, seed=3), **settings)
    if memory == "checkpointing":
        model.enable_input_require_grads()
    exact(tmp_path, model, unequal_batch(4), **MEMORY[memory])


# Adapters that add to the output of the base layer in place, or call linear by keywords.
OTHERS = {AdaLoraConfig: {"total_step": 10, "init_r": 4, "target_r": 2}, HRAConfig: {"r": 4},
          C3AConfig: {"block_size": 4}, GraloraConfig: {"r": 4, "gralora_k": 2}}  # fmt: skip


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", OTHERS)
def test_another_adapter_of_layers_is_exact(kind, tmp_path):
    model = get_peft_model(tiny_model("llama", seed=3), kind(**OTHERS[kind], target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    warned = kind is AdaLoraConfig
    with pytest.warns(UserWarning, match="all ranks stay at init_r") if warned else nullcontext():
        exact(tmp_path, model, unequal_batch(4))


TRAINED = [([r"model\.layers\.[23]\.", "lm_head"], 19), ([r"model\.layers\.0\.self_attn\.q_proj"], 1),
           ([r".*norm"], 9), (["lm_head"], 1)]  # fmt: skip


@pytest.mark.first(3)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("patterns", "trained"), TRAINED)
def test_some_of_the_weights_are_trained_exactly(patterns, trained, memory, tmp_path):
    model = freeze_except(tiny_model("llama", seed=3), patterns)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == trained
    exact(tmp_path, model, unequal_batch(4), **MEMORY[memory])


@pytest.mark.parametrize("use_dora", [False, True])
def test_conversions_that_are_left_out_change_no_bit(use_dora, tmp_path, monkeypatch):
    """A float32 adapter on bfloat16 weights under autocast: loss and gradients with PEFT's conversions and without."""
    runs, disabled = [], "ebft.prefix.forward.disable_input_dtype_casting"
    for casts in (False, True):
        if casts:
            monkeypatch.setattr(disabled, lambda *args, **kwargs: nullcontext())
        torch.manual_seed(0)
        model = with_adapter(tiny_model("llama").to(torch.bfloat16), use_dora=use_dora)
        trainer = make_trainer(model, tmp_path, bf16=True)
        loss = trainer.compute_loss(trainer.accelerator.prepare_model(trainer.model), unequal_batch()[0])
        loss.backward()
        runs.append((loss, *(p.grad for p in model.parameters() if p.requires_grad)))
    assert all(a.equal(b) for a, b in zip(*runs))
