"""The memory and disk space that a run needs, estimated from the model's configuration, without loading weights."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from ebft.config.schema import RunConfig
from ebft.doctor.environment import memory_bytes
from ebft.models.adapter import attach_adapter
from ebft.models.precision import weights_dtype

# Bytes of activations per token, layer and unit of the hidden size, as a multiple of the bytes of a number: without
# attention scores, about 17 (Korthikanti et al. 2022); with gradient checkpointing, the input of each layer.
_ACTIVATIONS, _CHECKPOINTED = 17, 1
# Optimizer values per trained weight; AdamW and similar ones otherwise. In bytes for 8-bit optimizers.
_STATES = {"sgd": 0, "adafactor": 0, "adagrad": 1, "lion": 1, "rmsprop": 1}


@dataclass(frozen=True)
class Estimate:
    """Bytes by purpose; `activations` is a rough figure, the others follow from the number of weights."""

    weights: int
    features: int  # a frozen copy of the model
    gradients: int
    optimizer: int
    activations: int
    checkpoint: int  # on disk
    parameters: int
    trained: int

    @property
    def fixed(self) -> int:
        return self.weights + self.features + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.fixed + self.activations


def estimate(config: RunConfig, model_config: Any, tokens: int) -> Estimate:
    """Return the estimate for a forward pass over `tokens` tokens, with the model of a transformers configuration."""
    dtype = weights_dtype(config)
    with init_empty_weights(include_buffers=True):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, trust_remote_code=config.trust_remote_code)
    parameters = sum(weight.numel() for weight in model.parameters())
    per_weight = 0.56 if config.load_in_4bit else 1 if config.load_in_8bit else dtype.itemsize
    trained, trained_bytes = parameters, dtype.itemsize
    if config.adapter is not None:
        trained, trained_bytes = _adapter_size(model, config), 4
    weights = int(parameters * per_weight) + (trained * trained_bytes if config.adapter is not None else 0)
    text = model_config.get_text_config()
    factor = _CHECKPOINTED if config.gradient_checkpointing else _ACTIVATIONS
    activations = tokens * text.hidden_size * text.num_hidden_layers * factor * dtype.itemsize
    if config.method.rows == "tokens" and not config.method.samples_blocks:
        activations += 2 * tokens * text.vocab_size * 4  # SFT keeps logits and their gradients in float32
    states = _optimizer_bytes(config.optimizer, trained_bytes) * trained
    copied = config.adapter is None and config.method.compares_features(config) and _on_same_device(config)
    return Estimate(
        weights=weights,
        features=weights if copied else 0,
        gradients=trained * trained_bytes,
        optimizer=states,
        activations=activations,
        checkpoint=trained * trained_bytes + (0 if config.save_only_model else states),
        parameters=parameters,
        trained=trained,
    )


def _adapter_size(model: Any, config: RunConfig) -> int:
    """Number of weights of the adapter. Its layers are those of the unquantised model."""
    if config.lora_model_dir is not None:
        files = Path(config.lora_model_dir).expanduser().glob("adapter_model.*")
        return sum(path.stat().st_size for path in files) // 4
    plain = config.model_copy(update={"load_in_4bit": False, "load_in_8bit": False})
    with init_empty_weights(include_buffers=True):
        adapted = attach_adapter(model, plain)
    return sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)


def _optimizer_bytes(name: str, trained_bytes: int) -> int:
    """Bytes of optimizer state per trained weight."""
    if "8bit" in name:
        return 2
    known = next((values for key, values in _STATES.items() if name.startswith(key)), 2)
    return known * trained_bytes


def _on_same_device(config: RunConfig) -> bool:
    return config.ebft.feature_device != "cpu" or not torch.cuda.is_available()


def available_memory() -> tuple[int | None, str]:
    """Return the free bytes of the device that trains, and what it is; None if unknown."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0], torch.cuda.get_device_name()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return memory_bytes(), "this machine (total memory)"
    limit = memory_bytes()
    return (free if limit is None else min(free, limit)), "this machine"


def free_disk(folder: str) -> tuple[int, Path]:
    """Return the free bytes on the disk of an output folder, and its nearest folder that exists."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free, existing


def is_writable(folder: Path) -> bool:
    """Whether files can be created in an existing folder, tested by creating one."""
    path = folder / f".ebft-doctor-{os.getpid()}"
    try:
        path.write_bytes(b"")
        path.unlink()
    except OSError:
        return False
    return True
