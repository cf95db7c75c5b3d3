"""Changes to a config that lower its memory in the phase of the peak, with estimates of what they save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ebft.config.schema import RunConfig
from ebft.doctor.estimate import Needs, Sizes
from ebft.machine import gib
from ebft.models.precision import weights_dtype

_LEAST = 0.01  # of the phase's memory; what saves less is not listed


def savings(needs: Needs, phase: str) -> list[str]:
    """Return changes that lower the memory of `phase`, those with the least cost in quality first.

    `phase` is one of `ebft.doctor.step.measure_step`. Each change is estimated alone, on the device of the model.
    """
    now = needs.of(needs.config).during(phase)
    found = []
    for text, changes in _changes(needs):
        sizes = Sizes(needs.sizes.base, 0) if "adapter" in changes and needs.config.adapter is None else None
        saved = now - needs.of(_changed(needs.config, changes), sizes).during(phase)
        if saved > _LEAST * now:
            found.append(f"{text} (saves about {gib(saved)})")
    return found


def advice(needs: Needs | None, phase: str) -> str:
    """Return `savings` as a list with one per line; empty if the memory cannot be estimated, or nothing lowers it."""
    found = savings(needs, phase) if needs is not None else []
    return " To lower it:" + "".join(f"\n  - {saving}" for saving in found) if found else ""


def _changes(needs: Needs) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes that may lower the memory, as text and as values of keys."""
    config = needs.config
    yield from _smaller_batches(config, needs.rows.step_tokens(config).loss)
    if not config.gradient_checkpointing:
        text = "gradient_checkpointing: true, which recomputes activations in the backward pass"
        yield text, {"gradient_checkpointing": True}
    on_gpu, is_full = torch.cuda.is_available(), config.adapter is None
    if is_full and config.method.compares_features(config) and on_gpu and config.ebft.feature_device != "cpu":
        text = "ebft.feature_device: cpu, or another GPU, for the frozen copy of the model"
        yield text, {"ebft.feature_device": "cpu"}
    if is_full and on_gpu and "8bit" not in config.optimizer:
        yield "optimizer: adamw_bnb_8bit", {"optimizer": "adamw_bnb_8bit"}
    if weights_dtype(config).itemsize > 2:
        yield "torch_dtype: bfloat16, for weights of half the size", {"torch_dtype": "bfloat16"}
    if is_full:
        text = "adapter: lora, without gradients, optimizer state or a frozen copy of the base model"
        yield text, {"adapter": "lora"}
    elif on_gpu and not (config.load_in_4bit or config.load_in_8bit):
        yield "adapter: qlora with load_in_4bit: true", {"adapter": "qlora", "load_in_4bit": True}
    yield from _smaller_rollouts(config)
    half = needs.rows.longest // 2
    if needs.rows.fit(config, half):
        text = f"sequence_len: {half}, half of the longest row; longer rows are cut, or dropped for lack of room"
        yield text, {"sequence_len": half}


def _smaller_batches(config: RunConfig, tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of the order of computation, which leave the step the same."""
    size = config.micro_batch_size
    if size > 1:
        smaller = max(part for part in range(1, size) if size % part == 0)
        accumulation = config.gradient_accumulation_steps * size // smaller
        text = f"micro_batch_size: {smaller} with gradient_accumulation_steps: {accumulation} (same step)"
        yield text, {"micro_batch_size": smaller, "gradient_accumulation_steps": accumulation}
    if config.method.samples_blocks and config.ebft.rollout_tokens_per_pass is None:
        part = min(4096, tokens // 2)
        text = f"ebft.rollout_tokens_per_pass: {part}, which computes rollouts in parts (same step)"
        yield text, {"ebft.rollout_tokens_per_pass": part}


def _smaller_rollouts(config: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of what is sampled."""
    if config.method.samples_blocks:
        section, counts = "ebft", {"n_samples_per_prompt": 2, "generate_max_len": 1}
    elif config.method.rows == "prompts":
        section, counts = "trl", {"max_completion_length": 1}
    else:
        return
    for key, least in counts.items():
        now = getattr(getattr(config, section), key)
        value = -(-now // 2)
        if least <= value < now:
            yield f"{section}.{key}: {value}", {f"{section}.{key}": value}


def _changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """Return the config with other values, of which some are in sections (`ebft.stride`)."""
    top: dict[str, Any] = {}
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        top[section or key] = getattr(config, section).model_copy(update={key: value}) if section else value
    return config.model_copy(update=top)
