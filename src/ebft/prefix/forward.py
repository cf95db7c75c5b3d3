"""Running a causal LM over passes with shared prefixes: attention implementation, hidden states and head.

`take_programs(model)` adds the keyword argument `function` to the forward of a transformers model; all other calls are
unchanged. `run_wrapped(model, function)` calls `function(causal_lm)` inside the module's forward, so that wrappers
added by accelerate, DDP, FSDP or PEFT apply, however many passes the function makes. `prepare(model)` also lets the
model's attention run over layouts with shared prefixes.
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

from ebft import transformers_internals as internals
from ebft.errors import ModelError, warn
from ebft.models.causal_lm import PLAIN, backbone_name, backbone_of, decoder_layers, unwrap_adapter, without_hooks
from ebft.models.sharding import is_partitioned, is_sharded, keep_head
from ebft.prefix.attention import HINT, IMPLEMENTATION, PrefixPass
from ebft.prefix.attention.attention_adapters import ADAPTED, adapt, check_adapted
from ebft.prefix.attention.passes import pass_in, running
from ebft.prefix.attention.states import adapt_states
from ebft.prefix.cpu import cpu_matmul
from ebft.prefix.gpu import fuse
from ebft.prefix.logps import Float32Results, Head, Linear, head_linear

Result = TypeVar("Result")

_RECURRENT = re.compile(
    r"mamba|linear_attention|recurrent|conv(?!1d$)|rwkv|state_?space|deltanet|delta_net|xlstm", re.I
)


def check_supported(causal_lm: PreTrainedModel) -> None:
    """Raise ModelError for architectures that cannot share a document prefix; the message names the feature."""
    name = type(causal_lm).__name__
    with_states, recurrent = list(internals.layers_with_states(causal_lm)), recurrent_layers(causal_lm)
    if recurrent and not with_states:
        raise ModelError(
            f"{name} has state-space, convolution or linear-attention layers ({', '.join(recurrent)}), whose state "
            f"cannot be shared between rollouts that start at different positions. {HINT}"
        )
    if not with_states and not internals.takes_attention_functions(causal_lm):
        check_adapted(causal_lm)


def recurrent_layers(causal_lm: PreTrainedModel) -> list[str]:
    """Return the names of layers that keep a state of previous tokens other than their keys and values."""
    kinds = {str(kind) for kind in (getattr(causal_lm.config.get_text_config(), "layer_types", None) or [])}
    kinds |= {type(module).__name__ for module in causal_lm.modules()}
    return sorted(kind for kind in kinds if _RECURRENT.search(kind))


def check_length(causal_lm: PreTrainedModel, length: int) -> None:
    """Check that documents of `length` tokens are supported by the model's positional embeddings.

    Raises ValueError if `length` exceeds `max_position_embeddings`, and ModelError if the rotary frequencies would
    depend on the sequence length.
    """
    config = causal_lm.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(f"a document of {length} tokens exceeds max_position_embeddings ({limit}): see sequence_len")
    most = most_tokens(causal_lm)
    if most is not None and length > most:
        raise ModelError(
            f"documents of more than {most} tokens (sequence_len) cannot be shared with this rope_type or index_topk"
        )


def most_tokens(causal_lm: PreTrainedModel) -> int | None:
    """Return the length above which rotary frequencies depend on a sequence's length, or an indexer leaves keys out;
    None if there is none."""
    config = causal_lm.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    changing = [kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")]
    lengths = [kind.get("original_max_position_embeddings") or limit for kind in changing]
    return min(filter(None, [*lengths, getattr(config, "index_topk", None)]), default=None)


def prepare(model: nn.Module, may_run_rows: bool = False) -> PreTrainedModel:
    """Prepare the causal LM inside `model` for `run_wrapped`, and return it. Can be called repeatedly.

    Raises ModelError for architectures that cannot share a prefix, unless `may_run_rows`, see `run_as_rows`.
    """
    causal_lm = unwrap_adapter(model)
    if "has_prefix_passes" in causal_lm.__dict__ or (may_run_rows and way_of(causal_lm) == ROWS):
        return causal_lm
    try:
        check_supported(causal_lm)
    except ModelError as error:
        if not may_run_rows:
            raise
        take_programs(causal_lm)
        return run_as_rows(causal_lm, error)
    take_programs(causal_lm)
    causal_lm.has_prefix_passes = True
    for module in backbone_of(causal_lm).modules():
        if hasattr(module, "config"):  # modules that read the attention implementation: backbone and attention
            module.register_forward_pre_hook(_switch_on, with_kwargs=True)
            module.register_forward_hook(_switch_off, with_kwargs=True, always_call=True)
        if type(module).__name__ in ADAPTED or hasattr(module, "index_topk"):
            adapt(module)
        fuse(module)
    for module in internals.layers_with_states(causal_lm):
        adapt_states(module)
        causal_lm.way = STATES
    return causal_lm


ATTENTION, STATES, ROWS = "attention to a shared prefix", "running states from anchors", "a row for each rollout"


def way_of(causal_lm: PreTrainedModel) -> str:
    """How a prepared model runs rollouts that begin with the same tokens."""
    return getattr(causal_lm, "way", ATTENTION)


def run_as_rows(causal_lm: PreTrainedModel, reason: ModelError) -> PreTrainedModel:
    """Run each rollout with its prefix as a row of its own, as the plain model does, with a warning of the cost."""
    causal_lm.way = ROWS
    warn(
        f"{type(causal_lm).__name__} cannot share a document prefix between rollouts, so each rollout is run with the "
        "text before it, and again for each token that is sampled. This is exact, but many times slower than other "
        f"models, or than `ebft.mode: structured`. {str(reason).removesuffix(f'. {HINT}')}."
    )
    return causal_lm


def take_programs(model: nn.Module) -> None:
    """Prepare the causal LM inside `model` for `run_wrapped`. Any architecture; can be called repeatedly."""
    causal_lm = unwrap_adapter(model)
    if "forward_of_model" not in causal_lm.__dict__:

        @wraps(type(causal_lm).forward)  # generate() inspects the signature
        def forward(self, *args, function=None, **kwargs):
            return self.forward_of_model(*args, **kwargs) if function is None else function(self)

        causal_lm.forward_of_model = causal_lm.forward
        causal_lm.forward = MethodType(forward, causal_lm)
        causal_lm.has_linear_head = has_linear_head(causal_lm)


def run_wrapped(model: nn.Module, function: Callable[[PreTrainedModel], Result]) -> Result:
    """Return `function(causal_lm)`, run inside the forward of `model`, which may wrap the prepared causal LM."""
    keep_head(unwrap_adapter(model))
    return model(function=function)


def backbone_states(causal_lm: PreTrainedModel, tokens: Tensor, run: PrefixPass) -> Tensor:
    """Return the last hidden states (P, D) of tokens (P,) in the layout of the pass.

    Must be called inside `run_wrapped`. Raises ModelError if some layers do not use strided attention.
    """
    rows = run.rows(tokens) if way_of(causal_lm) == ROWS else None
    if rows is not None:
        return run.of_tokens(backbone_of(causal_lm)(input_ids=rows, use_cache=False)[0])
    input_ids = tokens[None]
    run.calls.clear()
    with _cheaply(causal_lm, run), running(run):
        states = backbone_of(causal_lm)(
            input_ids=input_ids,
            # All ones, so that transformers does not interpret jumps in the positions as packed sequences.
            attention_mask=torch.ones_like(input_ids),
            position_ids=run.position_ids(),
            use_cache=False,
            prefix_pass=lambda: run,
        )[0]
    depth = len(decoder_layers(causal_lm))
    if len(run.calls) != depth and way_of(causal_lm) == ATTENTION:
        raise ModelError(
            f"{type(causal_lm).__name__}: only {len(run.calls)} of {depth} layers used strided attention. {HINT}"
        )
    return states.squeeze(0)


@contextmanager
def _cheaply(causal_lm: PreTrainedModel, run: PrefixPass) -> Iterator[None]:
    """Enable cheaper computation of the layers, with equal results: see `ebft.prefix.cpu` (CPU only). This excludes
    forward passes that gradient checkpointing may recompute, since the recomputed graph would differ."""
    with ExitStack() as stack:
        if not torch.is_grad_enabled():
            stack.enter_context(cpu_matmul(causal_lm.device))
        if not torch.is_grad_enabled() or run.reuse is not None:
            # PEFT casts inputs to the adapter's float32, and autocast casts them back. DoRA, however, computes norms of
            # the weights in the type of the input.
            adapters = getattr(causal_lm, "peft_config", {}).values()
            if adapters and torch.is_autocast_enabled(causal_lm.device.type):
                has_dora = any(getattr(adapter, "use_dora", False) for adapter in adapters)
                stack.enter_context(disable_input_dtype_casting(causal_lm, active=not has_dora))
        if run.reuse is not None:
            stack.enter_context(run.reuse)
        yield


def last_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, count: int) -> Tensor:
    """Return the logits (B, count, V) of the last `count` tokens of `input_ids` (B, tokens), from a plain pass."""

    def without_hooks_of_head(causal_lm: PreTrainedModel) -> Tensor:
        # With FSDP2, the backward of the hooks of the head would free weights that TRL's pass still needs.
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        states = backbone_of(causal_lm)(**inputs)[0][:, -count:]
        return apply_head(causal_lm, states.flatten(0, 1)).unflatten(0, states.shape[:2])

    take_programs(model)
    return run_wrapped(model, without_hooks_of_head)


# The hooks are registered on the modules that read the attention implementation rather than around the whole call,
# because gradient checkpointing recomputes single layers in backward, after the call has returned.


def _switch_on(module, args, kwargs):
    run = pass_in(kwargs)
    if run is not None:
        run.previous_implementation.append(internals.switch_attention(module, IMPLEMENTATION))


def _switch_off(module, args, kwargs, output):
    run = pass_in(kwargs)
    if run is not None:
        internals.switch_attention(module, run.previous_implementation.pop())


def head_of(causal_lm: PreTrainedModel) -> Head:
    """Return the model's head: hidden states (P, D) to logits (P, V), as in the model's forward.

    Only linear layers with 16-bit inputs differ: their results are in float32, see `ebft.prefix.logps.head_linear`.
    """
    name = backbone_name(causal_lm)
    own = [each for child, module in causal_lm.named_children() if child != name for each in module.parameters()]
    tied = causal_lm.get_output_embeddings().parameters()  # may be shared with the backbone's token embeddings
    own += causal_lm.parameters(recurse=False)
    trained = {id(parameter): parameter for parameter in (*own, *tied) if parameter.requires_grad}
    output, linear, results = causal_lm.get_output_embeddings(), None, Float32Results()
    if causal_lm.has_linear_head and _is_plain(causal_lm) and trained.keys() <= {id(output.weight), id(output.bias)}:
        linear = Linear(output.weight, output.bias)
    return Head(
        logits=lambda states: apply_head(causal_lm, states, results),
        vocab_size=causal_lm.config.get_text_config().vocab_size,
        trained=tuple(trained.values()),
        linear=linear,
    )


def apply_head(causal_lm: PreTrainedModel, states: Tensor, results: Float32Results | None = None) -> Tensor:
    """Return the logits (P, V) of hidden states (P, D) from the model's forward, including scaling and soft-capping.

    `results` keeps rounded weights from one call to the next.
    """
    replaced: dict[str, nn.Module] = {backbone_name(causal_lm): _GivenStates(backbone_of(causal_lm))}
    output = causal_lm.get_output_embeddings()
    if is_sharded(output):
        # The hooks of FSDP2 communicate, but processes have different numbers of rows and apply the head to different
        # numbers of chunks; and a gradient within the forward pass would end it. The weights are gathered once, and
        # the backward pass of the whole model reduces their gradients and frees them. With ZeRO-3, `keep_head` does so.
        if not is_partitioned(output):
            output.unshard()
        name = next(name for name, child in causal_lm.named_children() if child is output)
        replaced[name] = without_hooks(output)
    before = {name: causal_lm._modules[name] for name in replaced}
    causal_lm._modules.update(replaced)
    try:
        with cpu_matmul(states.device), results or Float32Results():
            return causal_lm.forward_of_model(inputs_embeds=states.unsqueeze(0), use_cache=False).logits.squeeze(0)
    finally:
        causal_lm._modules.update(before)


def _is_plain(causal_lm: PreTrainedModel) -> bool:
    """Whether the output layer is linear and nothing else. It has no adapter, no projection before it, no weights that
    are sharded, quantised or computed from others (as by `torch.nn.utils.prune`), and no hooks, except those that are
    marked with an attribute `only_observes`."""
    output, config = causal_lm.get_output_embeddings(), causal_lm.config.get_text_config()
    if type(output) is not nn.Linear or output.in_features != config.hidden_size or "forward" in output.__dict__:
        return False
    is_whole = {type(output.weight), type(output.weight.data)} <= PLAIN
    return is_whole and all(getattr(hook, "only_observes", False) for hook in internals.hooks_of(output))


@torch.no_grad()
def has_linear_head(causal_lm: PreTrainedModel) -> bool:
    """Return whether the output layer alone computes the logits; a model's forward may also scale or cap them.

    Compares both, for states whose logits are at most 1 and 1000; False if the weights, such as zeros before they are
    loaded, give none. `causal_lm` has taken programs (`ebft.prefix.forward.take_programs`).
    """
    output = causal_lm.get_output_embeddings()
    if not _is_plain(causal_lm) or output.weight.is_meta:
        return False
    states = torch.randn(1, output.in_features, generator=torch.Generator().manual_seed(0)).to(output.weight)
    with torch.autocast(states.device.type, enabled=False):
        largest = head_linear(states, output.weight, None).abs().max()
        if not 0 < largest < torch.inf:
            return False
        states = torch.cat([states / largest, states * (1000 / largest)])
        return torch.equal(apply_head(causal_lm, states), head_linear(states, output.weight, output.bias))


# The computation between hidden states and logits (scaling, soft-capping, a projection, a bias) differs between models
# and is part of their forward. The head is therefore that forward, with a backbone that returns the given states. Some
# forwards access submodules of the backbone (`self.model.decoder(...)` in OPT), others read optional fields of its
# output (`past_key_values`, `router_logits`), hence the two `__getattr__`.


class _GivenStates(nn.Module):
    """Replaces the backbone, and any submodule of it, while the head is applied to precomputed states. Its other
    attributes, such as the factor of the logits in Falcon-H1, are the backbone's."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.__dict__["replaced"] = backbone  # not a submodule

    def __getattr__(self, name):
        value = getattr(self.replaced, name)
        return self if isinstance(value, nn.Module) else value

    def forward(self, *args, inputs_embeds=None, **kwargs):
        return _States(last_hidden_state=inputs_embeds)


@dataclass
class _States(internals.ModelOutput):
    """A backbone output in which all optional fields are None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return
