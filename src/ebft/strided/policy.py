"""A causal LM that can run over a strided layout: switched attention, hidden states, and its own scoring head.

`prepare(model)` adds one keyword argument to a transformers model's forward, `function`, and leaves every other call as
it was. `run_wrapped(model, function)` calls `function(causal_lm)` within the module's own forward, so that whatever
accelerate, DDP, FSDP or PEFT wrapped around it takes part, however many passes the function makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import TypeVar

import torch
from peft.helpers import disable_input_dtype_casting
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.errors import ModelError
from ebft.models.causal_lm import backbone_name, backbone_of, decoder_layers, unwrap_adapter
from ebft.models.products import fast_products
from ebft.over_transformers import ModelOutput, switch_attention, takes_attention_functions
from ebft.strided.attention import IMPLEMENTATION, StridedPass
from ebft.strided.logps import Head

Result = TypeVar("Result")

_RECURRENT = re.compile(
    r"mamba|linear_attention|recurrent|conv(?!1d$)|rwkv|state_?space|deltanet|delta_net|xlstm", re.I
)
_HINT = "Use `ebft.mode: structured` for this model"


def check_supported(causal_lm: PreTrainedModel) -> None:
    """Refuse models whose architecture cannot share one document prefix, naming the feature."""
    name, config = type(causal_lm).__name__, causal_lm.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; EBFT trains decoder-only causal language models")
    kinds = {str(kind) for kind in (getattr(config, "layer_types", None) or [])}
    kinds |= {type(module).__name__ for module in causal_lm.modules()}
    recurrent = sorted(kind for kind in kinds if _RECURRENT.search(kind))
    if recurrent:
        raise ModelError(
            f"{name} has state-space, convolution or linear-attention layers ({', '.join(recurrent)}), whose state "
            f"cannot be shared by rollouts that start at different places. {_HINT}"
        )
    if not takes_attention_functions(causal_lm):
        raise ModelError(f"{name} does not use the attention interface of transformers. {_HINT}")


def check_length(causal_lm: PreTrainedModel, length: int) -> None:
    """Refuse lengths beyond the model's positions, or where its rotary frequencies depend on the length."""
    config = causal_lm.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"a document of {length} tokens is longer than the model's max_position_embeddings {limit}: "
            f"cut documents to at most {limit} tokens (sequence_len in a config)"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    for kind in kinds:
        original = kind.get("original_max_position_embeddings") or limit
        if kind.get("rope_type") in ("dynamic", "longrope") and original and length > original:
            raise ModelError(
                f"rope_type {kind['rope_type']!r} changes every position's rotation once a sequence passes {original} "
                f"tokens, so rollouts and documents of {length} tokens cannot share a prefix: "
                f"set sequence_len to at most {original}"
            )


def prepare(model: nn.Module) -> PreTrainedModel:
    """Teach the causal LM inside `model` to run a `wrapped_forward` in its forward; returns it. Safe to call twice.

    Raises ModelError for architectures that strided EBFT cannot honour exactly.
    """
    causal_lm = unwrap_adapter(model)
    check_supported(causal_lm)
    if "forward_of_model" in causal_lm.__dict__:
        return causal_lm
    causal_lm.forward_of_model = causal_lm.forward
    causal_lm.forward = MethodType(_taking_programs(causal_lm), causal_lm)
    for module in backbone_of(causal_lm).modules():
        if hasattr(module, "config"):  # what reads the attention's name: the backbone and its attention
            module.register_forward_pre_hook(_switch_on, with_kwargs=True)
            module.register_forward_hook(_switch_off, with_kwargs=True, always_call=True)
    return causal_lm


def run_wrapped(model: nn.Module, function: Callable[[PreTrainedModel], Result]) -> Result:
    """`function(causal_lm)`, run within the forward of `model`, whatever is wrapped around the prepared causal LM."""
    return model(function=function)


def _taking_programs(causal_lm: PreTrainedModel) -> Callable:
    """`forward` of a prepared model, with the signature that it had: generate() reads off it what a model can do."""

    @wraps(type(causal_lm).forward)
    def forward(self, *args, function=None, **kwargs):
        return self.forward_of_model(*args, **kwargs) if function is None else function(self)

    return forward


def backbone_states(causal_lm: PreTrainedModel, tokens: Tensor, run: StridedPass) -> Tensor:
    """Last hidden states (P, D) of tokens (P,) as the pass lays them out. To be called inside `run_wrapped`."""
    input_ids = tokens[None]
    run.layers_seen.clear()
    with _cheaply(causal_lm, run):
        states = backbone_of(causal_lm)(
            input_ids=input_ids,
            # All ones: keeps transformers from reading jumps in the positions as packed sequences.
            attention_mask=torch.ones_like(input_ids),
            position_ids=run.position_ids(),
            use_cache=False,
            strided=run,
        )[0]
    depth = len(decoder_layers(causal_lm))
    if len(run.layers_seen) != depth:
        raise ModelError(
            f"{type(causal_lm).__name__}: {len(run.layers_seen)} of {depth} layers used strided attention. {_HINT}"
        )
    return states[0]


@contextmanager
def _cheaply(causal_lm: PreTrainedModel, run: StridedPass) -> Iterator[None]:
    """Inside the block, layers run as a pass allows, with the same numbers: see `ebft.models.products` and `recording`.

    Not the layers of a forward that gradient checkpointing may run again, which would find another graph than it left.
    """
    with ExitStack() as stack:
        if not torch.is_grad_enabled():
            stack.enter_context(fast_products())
        if not torch.is_grad_enabled() or run.recording is not None:
            # PEFT converts inputs to the adapter's float32, and autocast converts them back.
            casts_anyway = torch.is_autocast_enabled(causal_lm.device.type)
            stack.enter_context(disable_input_dtype_casting(causal_lm, active=casts_anyway))
        if run.recording is not None:
            stack.enter_context(run.recording)
        yield


def head_of(causal_lm: PreTrainedModel) -> Head:
    """From hidden states (P, D) to logits (P, V), as the model's own forward does it."""
    of_backbone = {id(parameter) for parameter in backbone_of(causal_lm).parameters()}
    own = [parameter for parameter in causal_lm.parameters() if id(parameter) not in of_backbone]
    tied = causal_lm.get_output_embeddings().parameters()  # with the token embeddings, which are the backbone's
    trained = {id(parameter): parameter for parameter in (*own, *tied) if parameter.requires_grad}
    return Head(
        logits=lambda states: _head(causal_lm, states),
        vocab_size=causal_lm.config.get_text_config().vocab_size,
        trained=tuple(trained.values()),
    )


# What stands between hidden states and logits (scaling, soft-capping, a projection, a bias) differs by model and is
# code of its forward, so the head is that forward with a backbone that returns the states it is given. Some forwards
# reach through the backbone (`self.model.decoder(...)` in OPT), others read optional fields of its output
# (`past_key_values`, `router_logits`): hence the two `__getattr__`.


class _GivenStates(nn.Module):
    """Stands in for the backbone, and for any part of it, while a head is applied to states already there."""

    def __getattr__(self, name):
        return self

    def forward(self, *args, inputs_embeds=None, **kwargs):
        return _States(last_hidden_state=inputs_embeds)


@dataclass
class _States(ModelOutput):
    """A backbone output whose every optional field is None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return


def _head(causal_lm: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits (P, V) of hidden states (P, D) by the model's own forward: head, scaling, soft-capping and all."""
    name = backbone_name(causal_lm)
    backbone = causal_lm._modules[name]
    causal_lm._modules[name] = _GivenStates()
    try:
        with fast_products():
            return causal_lm.forward_of_model(inputs_embeds=states.unsqueeze(0), use_cache=False).logits.squeeze(0)
    finally:
        causal_lm._modules[name] = backbone


# Hooks sit on the modules that read the attention implementation, not around the whole call, because gradient
# checkpointing runs single layers again in backward, long after the call has returned.


def _switch_on(module, args, kwargs):
    run = kwargs.get("strided")
    if run is not None:
        run.previous_implementation.append(switch_attention(module, IMPLEMENTATION))


def _switch_off(module, args, kwargs, output):
    run = kwargs.get("strided")
    if run is not None:
        switch_attention(module, run.previous_implementation.pop())
