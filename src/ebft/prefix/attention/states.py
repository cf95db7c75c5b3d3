"""Layers with a running state (convolutions, state-space models, linear attention) in passes with a shared prefix.

Such a layer of transformers reads the state before its first token from a cache, and writes the one after its last.
`States` is the cache of one layer, whose tensors are never changed in place: a document is run from anchor to anchor,
each rollout continues from the states at its anchor, and gradients flow through the states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebft.errors import ModelError
from ebft.prefix.attention.passes import Spans, current_pass, pass_in


class States:
    """The states of a layer, of several sequences (rows, ...), with the methods of transformers' cache for them."""

    def __init__(self, kept: dict[tuple[str, int], Tensor] | None = None) -> None:
        self.kept = dict(kept or {})

    def rows(self, index: Tensor) -> States:
        """The states of the sequences of these numbers."""
        return States({name: state.index_select(0, index) for name, state in self.kept.items()})

    def get_conv_state(self, layer_idx: int | None = None, state_idx: int = 0) -> Tensor | None:
        return self._own("conv", state_idx)

    def get_recurrent_state(self, layer_idx: int | None = None, state_idx: int = 0) -> Tensor | None:
        return self._own("recurrent", state_idx)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """True, which asks layers not to change a state in place."""
        return True

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append the inputs (rows, channels, tokens) of a convolution, and return them after those that it needs."""
        before = self.kept.get(("conv", state_idx))
        size = (new if before is None else before).shape[-1] if conv_kernel_size is None else conv_kernel_size
        found = new if before is None else torch.cat([before, new], -1)
        self.kept["conv", state_idx] = F.pad(found, (max(0, size - found.shape[-1]), 0))[..., -size:]
        return found

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.kept["recurrent", state_idx] = new
        return new

    def _own(self, kind: str, number: int) -> Tensor | None:
        """A copy, which kernels for single tokens change in place."""
        if (kind, number) in self.kept:
            self.kept[kind, number] = self.kept[kind, number].clone()
        return self.kept.get((kind, number))


Layer = Callable[[Tensor, States], Tensor]  # hidden states (rows, tokens, D) after `states`, which it replaces


def along_documents(layer: Layer, hidden: Tensor, spans: Spans, anchors: list[list[int]]) -> tuple[Tensor, States]:
    """Run documents (1, S, D) from anchor to anchor. Returns their outputs, and the states before each anchor."""
    outputs, found = [], []
    for (start, end), stops in zip(spans, anchors):
        states = States()
        for first, last in pairwise([0, *stops]):
            part = hidden[:, start + first : start + last]
            if torch.is_grad_enabled() and part.shape[1] == 1 and first:
                raise ModelError("ebft.stride: 1 is not supported for models with running states. Set a higher stride")
            outputs.append(layer(part, states))
            found.append(States(states.kept))
        rest = hidden[:, start + max(stops, default=0) : end]
        outputs += [run_to_end(layer, rest, states)] if rest.shape[1] else []
    names = found[0].kept if found else ()
    return torch.cat(outputs, 1), States({name: torch.cat([each.kept[name] for each in found]) for name in names})


def run_to_end(layer: Layer, hidden: Tensor, states: States) -> Tensor:
    """Run tokens after which no state is read. A single one is run twice: kernels for one may have no gradient."""
    if hidden.shape[1] != 1 or not torch.is_grad_enabled():
        return layer(hidden, states)
    return layer(hidden.expand(-1, 2, -1), states)[:, :1]


def adapt_states(module: nn.Module) -> None:
    """Let a layer with a running state take part in passes."""
    if "forward_of_model" not in module.__dict__:
        found = signature(module.forward).parameters
        module.cache_name = next(name for name in ("cache", "cache_params", "past_key_values") if name in found)
        module.passes_on = any(each.kind is each.VAR_KEYWORD for each in found.values())
        module.forward_of_model = module.forward
        module.forward = MethodType(_forward, module)


def _forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    run = pass_in(kwargs)
    if run is None and (run := current_pass()) is not None:
        self.reads_current_pass = True
    elif run is None and self.training and torch.is_grad_enabled() and getattr(self, "reads_current_pass", False):
        raise ModelError(
            f"{type(self).__name__} cannot be recomputed in backward in strided mode. Set gradient_checkpointing: false"
        )
    if run is None:
        return self.forward_of_model(hidden_states, *args, **kwargs)
    return run.advance(run.number(self), partial(_run, self), hidden_states)


def _run(self: nn.Module, hidden: Tensor, states: States) -> Tensor:
    """Run a layer. On CPU, its functions compute whole chunks, so these are made as small as the sequences."""
    arguments, size = {self.cache_name: states}, 1 << max(3, (hidden.shape[1] - 1).bit_length())
    usual = getattr(self, "chunk_size", None)
    if hidden.device.type == "cpu" and usual is not None:
        self.chunk_size = min(size, usual)
    elif hidden.device.type == "cpu" and self.passes_on:
        arguments["chunk_size"] = min(size, 64)
    try:
        return self.forward_of_model(hidden, **arguments)
    finally:
        if usual is not None:
            self.chunk_size = usual
