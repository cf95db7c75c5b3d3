"""Liger's kernels for layers, which transformers puts into a model when training starts: which, and whether it can.

The kernels of Liger for cross-entropies are not used: see `ebft.prefix.cross_entropy`.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from ebft.errors import ModelError

# Key -> what Liger calls it. Its kernel of gated layers has two names, of which a model has one.
KERNELS = {
    "liger_rope": ("rope",),
    "liger_rms_norm": ("rms_norm",),
    "liger_layer_norm": ("layer_norm",),
    "liger_glu_activation": ("swiglu", "geglu"),
}
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


def liger_arguments(asked: list[str]) -> dict[str, Any]:
    """The training arguments for the kernels of these keys; all others are switched off."""
    if not asked:
        return {}
    kernels = {name: key in asked for key, names in KERNELS.items() for name in names}
    return {"use_liger_kernel": True, "liger_kernel_config": {**kernels, **dict.fromkeys(_LOSSES, False)}}


def check_kernels(model_type: str, asked: list[str]) -> None:
    """Raise ModelError if Liger does not have a kernel for a type of models, which it would leave out silently."""
    found = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    known = inspect.signature(found).parameters if found else {}
    missing = [key for key in asked if not set(KERNELS[key]) & set(known)]
    if missing:
        raise ModelError(f"{', '.join(missing)}: Liger has no such kernel for {model_type} models. Remove it.")
