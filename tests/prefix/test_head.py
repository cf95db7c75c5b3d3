"""Which heads are a linear layer and nothing else, so that gradients may be computed from its weights alone."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from ebft.models.causal_lm import unwrap_adapter
from ebft.prefix.head import head_of
from ebft.prefix.policy import run_wrapped, take_programs
from tests.strided.families import FAMILIES, tiny_model

# Families whose forward scales or caps the logits.
CHANGES_LOGITS = {"gemma2", "granite", "cohere2"}


def linear_head(model):
    take_programs(model)
    return run_wrapped(model, head_of).linear


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_linear_unless_the_forward_changes_logits(family):
    model = tiny_model(family)
    linear = linear_head(model)
    if family in CHANGES_LOGITS:
        assert linear is None
        return
    assert linear.weight is model.get_output_embeddings().weight
    take_programs(model)
    states = torch.randn(3, linear.weight.shape[1])
    logits = run_wrapped(model, lambda causal_lm: head_of(causal_lm).logits(states))
    torch.testing.assert_close(logits, F.linear(states, *linear))


def test_a_head_with_an_adapter_or_hooks_is_not_linear():
    assert linear_head(tiny_model("llama")) is not None
    assert linear_head(get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["lm_head"], r=2))) is None
    model = tiny_model("llama")
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output + 1)
    assert linear_head(model) is None


def test_an_adapter_of_the_head_that_is_added_later():
    model = tiny_model("llama")
    assert linear_head(model) is not None
    assert linear_head(get_peft_model(model, LoraConfig(target_modules=["lm_head"], r=2))) is None


def test_a_frozen_head_is_linear_too():
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    assert linear_head(adapted) is not None
    assert not unwrap_adapter(adapted).get_output_embeddings().weight.requires_grad


def test_a_new_output_layer_is_found():
    model = tiny_model("llama")
    first = linear_head(model)
    model.set_output_embeddings(torch.nn.Linear(32, 97))
    assert linear_head(model).weight is not first.weight and linear_head(model).bias is not None
