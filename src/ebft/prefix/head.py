"""The language-model head of a causal LM: everything between its hidden states and its logits, as its forward has it.

P  states   D  hidden size   V  vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ebft.models.causal_lm import backbone_name, backbone_of
from ebft.models.products import fast_products
from ebft.models.sharding import is_sharded
from ebft.models.unhooked import without_hooks
from ebft.over_transformers import ModelOutput, hooks_of
from ebft.prefix.logps import Head, Linear


def head_of(causal_lm: PreTrainedModel) -> Head:
    """Return the model's head: hidden states (P, D) to logits (P, V), exactly as in the model's forward."""
    of_backbone = {id(parameter) for parameter in backbone_of(causal_lm).parameters()}
    own = [parameter for parameter in causal_lm.parameters() if id(parameter) not in of_backbone]
    tied = causal_lm.get_output_embeddings().parameters()  # may be shared with the backbone's token embeddings
    trained = {id(parameter): parameter for parameter in (*own, *tied) if parameter.requires_grad}
    return Head(
        logits=lambda states: apply_head(causal_lm, states),
        vocab_size=causal_lm.config.get_text_config().vocab_size,
        trained=tuple(trained.values()),
        linear=_linear(causal_lm, set(trained)),
    )


def apply_head(causal_lm: PreTrainedModel, states: Tensor) -> Tensor:
    """Return the logits (P, V) of hidden states (P, D) from the model's forward, including scaling and soft-capping."""
    replaced: dict[str, nn.Module] = {backbone_name(causal_lm): _GivenStates(backbone_of(causal_lm))}
    output = causal_lm.get_output_embeddings()
    if is_sharded(output):
        # The hooks of FSDP2 communicate, but processes have different numbers of rows and apply the head to different
        # numbers of chunks; and a gradient within the forward pass would end it. The weights are gathered once, and
        # the backward pass of the whole model reduces their gradients and frees them.
        output.unshard()
        name = next(name for name, child in causal_lm.named_children() if child is output)
        replaced[name] = without_hooks(output)
    before = {name: causal_lm._modules[name] for name in replaced}
    causal_lm._modules.update(replaced)
    try:
        with fast_products():
            return causal_lm.forward_of_model(inputs_embeds=states.unsqueeze(0), use_cache=False).logits.squeeze(0)
    finally:
        causal_lm._modules.update(before)


def _linear(causal_lm: PreTrainedModel, trained: set[int]) -> Linear | None:
    """Return the weights of a head that is a linear layer, with no other trained weights; None for other heads."""
    if not causal_lm.has_linear_head or not _is_plain(causal_lm):
        return None
    output = causal_lm.get_output_embeddings()
    is_all = trained <= {id(output.weight), id(output.bias)}
    return Linear(output.weight, output.bias) if is_all else None


def _is_plain(causal_lm: PreTrainedModel) -> bool:
    """Whether the output layer is linear and nothing else.

    It has no adapter, no projection before it, no weights that are sharded, quantised or computed from others (as by
    `torch.nn.utils.prune`), and no hooks, except those that are marked with an attribute `only_observes`.
    """
    output, config = causal_lm.get_output_embeddings(), causal_lm.config.get_text_config()
    if type(output) is not nn.Linear or output.in_features != config.hidden_size or "forward" in output.__dict__:
        return False
    is_whole = type(output.weight) is nn.Parameter and type(output.weight.data) is Tensor
    return is_whole and all(getattr(hook, "only_observes", False) for hook in hooks_of(output))


@torch.no_grad()
def has_linear_head(causal_lm: PreTrainedModel) -> bool:
    """Return whether the output layer alone computes the logits; a model's forward may also scale or cap them.

    Compares both, for states whose logits are at most 1 and 1000; False if the weights, such as zeros before they are
    loaded, give none. `causal_lm` has taken programs (`ebft.prefix.policy.take_programs`).
    """
    output = causal_lm.get_output_embeddings()
    if not _is_plain(causal_lm) or output.weight.is_meta:
        return False
    states = torch.randn(1, output.in_features, generator=torch.Generator().manual_seed(0)).to(output.weight)
    with torch.autocast(states.device.type, enabled=False), fast_products():
        largest = F.linear(states, output.weight).abs().max()
        if not 0 < largest < torch.inf:
            return False
        states = torch.cat([states / largest, states * (1000 / largest)])
        return torch.equal(apply_head(causal_lm, states), F.linear(states, output.weight, output.bias))


# The computation between hidden states and logits (scaling, soft-capping, a projection, a bias) differs between models
# and is part of their forward. The head is therefore that forward, with a backbone that returns the given states. Some
# forwards access submodules of the backbone (`self.model.decoder(...)` in OPT), others read optional fields of its
# output (`past_key_values`, `router_logits`), hence the two `__getattr__`.


class _GivenStates(nn.Module):
    """Replaces the backbone, and any submodule of it, while the head is applied to precomputed states.

    Its other attributes, such as the factor of the logits in Falcon-H1, are those of the backbone.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.__dict__["replaced"] = backbone  # not a submodule

    def __getattr__(self, name):
        value = getattr(self.replaced, name)
        return self if isinstance(value, nn.Module) else value

    def forward(self, *args, inputs_embeds=None, **kwargs):
        return _States(last_hidden_state=inputs_embeds)


@dataclass
class _States(ModelOutput):
    """A backbone output in which all optional fields are None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return
