"""Equally many passes of a sharded model on all processes, whose completions have different lengths.

Before each pass of the decoder, a process announces that it makes one; a process that has finished makes a pass of one
token, without using its result, for as long as another process announces one. The number of turns may differ, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ebft.models.causal_lm import backbone_of, evaluating, unwrap_adapter
from ebft.models.sharding import is_sharded
from ebft.prefix.policy import run_wrapped, take_programs


@contextmanager
def passes_in_step(model: nn.Module, accelerator: Any) -> Iterator[None]:
    """Let processes make different numbers of passes of `model` within the block; no effect if it is not sharded.

    All processes must enter and leave the block together. Gradients must not be computed in it.
    """
    if not is_sharded(model):
        yield
        return
    take_programs(model)
    idle(model)  # gathers what remains gathered between passes, so that later passes of all processes do the same

    def announce(*_: Any) -> None:
        _someone_goes_on(accelerator, True)

    hook = backbone_of(unwrap_adapter(model)).register_forward_pre_hook(announce)
    try:
        yield
    finally:
        hook.remove()
    while _someone_goes_on(accelerator, False):
        idle(model)


def idle(model: nn.Module) -> None:
    """Run a forward pass of one token."""

    def one_token(causal_lm: PreTrainedModel) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=causal_lm.device)
        causal_lm.forward_of_model(input_ids=token, use_cache=False)

    with evaluating(model):
        run_wrapped(model, one_token)


def _someone_goes_on(accelerator: Any, this_process: bool) -> bool:
    """Return whether a process makes another pass, as each of them reports."""
    passes = accelerator.reduce(torch.tensor(float(this_process), device=accelerator.device), "sum")
    return this_process or bool(passes)
