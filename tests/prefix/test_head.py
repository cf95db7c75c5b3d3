"""Which heads are a linear layer and nothing else, so that gradients may be computed from its weights alone."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from ebft.models.causal_lm import unwrap_adapter
from ebft.monitor.budget import FlopMeter
from ebft.prefix.forward import backbone_of, head_of, last_logits, run_wrapped, take_programs
from ebft.prefix.logps import token_logps
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
    adapted = lambda model, *names: get_peft_model(model, LoraConfig(target_modules=list(names), r=2))
    model = tiny_model("llama")
    first = linear_head(model)
    assert first is not None and linear_head(adapted(tiny_model("llama"), "lm_head")) is None
    with FlopMeter().watching([model]):
        assert linear_head(model) is not None  # these only observe
    model.set_output_embeddings(nn.Linear(32, 97))
    assert linear_head(model).weight is not first.weight and linear_head(model).bias is not None
    frozen = adapted(model, "q_proj")
    assert linear_head(frozen) is not None
    assert not unwrap_adapter(frozen).get_output_embeddings().weight.requires_grad
    later = tiny_model("llama")
    assert linear_head(later) is not None and linear_head(adapted(later, "lm_head")) is None


@pytest.mark.parametrize("family", ["llama", *sorted(CHANGES_LOGITS)])
@pytest.mark.parametrize("scale", [0.0, 1e-12])
def test_weights_that_are_loaded_later(family, scale):
    """Logits that are all zero, or too small to be capped, do not tell what the forward does with others."""
    model = tiny_model(family)
    before = model.get_output_embeddings().weight.data.clone()
    model.get_output_embeddings().weight.data.mul_(scale)
    take_programs(model)
    model.get_output_embeddings().weight.data.copy_(before)
    assert (linear_head(model) is not None) == (family == "llama" and scale > 0)


def replace_forward(output):
    forward = output.forward
    output.forward = lambda states: 2 * forward(states)


LATER = {"hook": lambda output: output.register_forward_hook(lambda module, args, logits: 2 * logits),
         "hook before": lambda output: output.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
         "backward hook": lambda output: output.register_full_backward_hook(lambda module, grads, others: None),
         "forward": replace_forward, "pruning": lambda output: prune.l1_unstructured(output, "weight", 0.5),
         "weight norm": lambda output: nn.utils.weight_norm(output),
         "parametrization": lambda output: nn.utils.parametrizations.weight_norm(output)}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("change", LATER.values(), ids=LATER)
def test_a_head_that_is_changed_later_has_the_gradients_of_its_forward(change):
    model = tiny_model("llama")
    assert linear_head(model) is not None
    output = model.get_output_embeddings()
    change(output)
    assert linear_head(model) is None
    states = torch.randn(5, 32, requires_grad=True)
    tokens = torch.randint(97, (5, 2))
    trained = [states, *output.parameters()]
    found = run_wrapped(model, lambda causal_lm: token_logps(states, tokens, head_of(causal_lm), 0.7))
    expected = (output(states) / 0.7).log_softmax(-1).gather(-1, tokens)
    grads = zip(torch.autograd.grad(found.sum(), trained), torch.autograd.grad(expected.sum(), trained))
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in grads)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "opt"])
@pytest.mark.parametrize("autocast", [False, True])
def test_logits_of_16_bit_weights_are_those_of_a_float32_head(family, autocast):
    """Twin: the same model with its head in float32, given the hidden states of the rounded one."""
    model = tiny_model(family).to(torch.float32 if autocast else torch.bfloat16).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20).copy_(model.get_output_embeddings().weight.bfloat16())
    ids, mask = torch.randint(3, 97, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = last_logits(model, ids, mask, 4)
        states = backbone_of(model)(input_ids=ids, attention_mask=mask, use_cache=False)[0][:, -4:]
        rounded = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -4:]
    take_programs(twin := copy.deepcopy(model).float())
    with torch.no_grad():
        exact = run_wrapped(twin, lambda lm: head_of(lm).logits(states.bfloat16().float().flatten(0, 1)))
    assert found.dtype == torch.float32 and states.isfinite().all()
    torch.testing.assert_close(found, exact.view_as(found), atol=1e-4, rtol=1e-5)
    assert (rounded.float() - exact.view_as(found)).abs().max() > 100 * (found - exact.view_as(found)).abs().max()
