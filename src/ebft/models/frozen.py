"""A frozen copy of a model, as the feature network and the reference model are without an adapter."""

from __future__ import annotations

import copy
import os

import torch
from accelerate import PartialState
from torch import distributed, nn
from transformers import PreTrainedModel

from ebft.models.causal_lm import unwrap_adapter


def frozen_copy(model: nn.Module) -> PreTrainedModel:
    """Return a copy of the causal LM in `model` that is not trained, with the weights of the first process."""
    frozen = copy.deepcopy(unwrap_adapter(model)).requires_grad_(False).eval()
    if os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true" and _is_one_of_many():
        _take_weights_of_rank_0(frozen)
    return frozen


def _is_one_of_many() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@torch.no_grad()
def _take_weights_of_rank_0(model: nn.Module) -> None:
    """Broadcast the weights of rank 0.

    FSDP with `cpu_ram_efficient_loading` loads weights on rank 0 only and broadcasts them when training starts.
    """
    device = PartialState().device
    for tensor in (*model.parameters(), *model.buffers()):
        shared = tensor.detach().to(device)
        distributed.broadcast(shared, 0)
        tensor.copy_(shared)
