"""Whether a step of a config fits on a card, in which phases its memory and its time are, and what to change.

`ebft doctor CONFIG --for h100` plans the step (plan.py) and compares it with the card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError, ModelError
from ebft.machine import gib
from ebft.models.load import load_model_config
from ebft.tools.doctor.environment import Check
from ebft.tools.doctor.memory import changed, changes
from ebft.tools.doctor.plan import BEFORE, Plan, Planner, Request

_GIB = 2**30
_KERNEL = 10e-6  # seconds that Python needs to start a kernel
_SHORTEST = 128  # tokens of a row that may be halved
_RESERVE = 1.0  # GiB for the CUDA context, the libraries' workspaces and the allocator's gaps


@dataclass(frozen=True)
class Card:
    """A GPU by its vendor's data sheet: GiB of memory, dense FLOP/s in bfloat16 and float32, bytes per second."""

    memory: float
    bfloat16: float | None = None
    float32: float | None = None
    bandwidth: float | None = None


CARDS = {
    "rtx4090": Card(24, 165e12, 83e12, 1.01e12),
    "a6000": Card(48, 155e12, 39e12, 0.77e12),
    "l40s": Card(45, 362e12, 92e12, 0.86e12),
    "a100-40": Card(40, 312e12, 19.5e12, 1.56e12),
    "a100": Card(80, 312e12, 19.5e12, 2.04e12),
    "h100": Card(80, 989e12, 67e12, 3.35e12),
    "h200": Card(140, 989e12, 67e12, 4.8e12),
    "b200": Card(179, 2250e12, 75e12, 8.0e12),
}

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {"model_type": "qwen3_5_text", "max_position_embeddings": 262144}


def _llama(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return _LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": 64 if layers == 16 else 128,
        "tie_word_embeddings": tied,
    }


# What config.json says of models that may not be reachable; the values that it leaves out are transformers' defaults.
KNOWN: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, tied=True),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14336, 32, 32, tied=False),
    "Qwen/Qwen3.5-4B": _QWEN | {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "Qwen/Qwen3.5-9B": _QWEN | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}


def model_config_of(config: RunConfig) -> tuple[Any, str]:
    """The configuration of the base model, from its config.json or `KNOWN`, and which of them. Raises ModelError."""
    try:
        return load_model_config(config), "config.json"
    except (ModelError, ConfigError, OSError) as error:
        name = re.sub("-Instruct$", "", config.base_model)
        if name not in KNOWN:
            raise ModelError(
                f"{error} To plan without it, set base_model to a folder with its config.json (weights are not needed)."
            ) from error
    from transformers import AutoConfig

    values = dict(KNOWN[name])
    return AutoConfig.for_model(values.pop("model_type"), **values), f"the known shape of {name}"


def card_of(name: str | None, memory: str | None) -> tuple[str, Card]:
    """The card of `--for`, with the memory of `--memory` if it is given. Raises ConfigError."""
    found = Card(0)
    if name is not None:
        if name.lower() not in CARDS:
            raise ConfigError(f"--for {name}: unknown card. Choose from {', '.join(CARDS)}, or use --memory 80GiB.")
        found = CARDS[name.lower()]
    if memory is None:
        return str(name).lower(), found
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|G)?", memory.strip(), re.IGNORECASE)
    size = float(parsed[1]) if parsed else 0.0
    if not 0 < size < 10_000:
        raise ConfigError(f"--memory {memory}: expected the memory of a card in GiB, such as 24GiB.")
    return name or f"a card with {size:g} GiB", Card(size, found.bfloat16, found.float32, found.bandwidth)


@dataclass(frozen=True)
class Floor:
    """The least seconds of a step: its FLOPs at the card's rate, its bytes at its bandwidth, its kernels' launches."""

    flops: float
    moved: float
    kernels: float

    @property
    def total(self) -> float:
        return max(self.flops, self.moved, self.kernels)


def floor(plan: Plan, card: Card, config: RunConfig) -> Floor | None:
    """The floor of an optimizer step; None if the rates of the card are not known."""
    rate = card.bfloat16 if _is_rounded(config) else card.float32
    if rate is None or card.bandwidth is None:
        return None
    step = [use for name, use in plan.phases.items() if name not in (*BEFORE, "evaluation")]
    flops, moved, kernels = (sum(getattr(use, name) for use in step) for name in ("flops", "moved", "kernels"))
    return Floor(flops / rate, moved / card.bandwidth, kernels * _KERNEL)


def _is_rounded(config: RunConfig) -> bool:
    """Whether products are computed with 16 bits."""
    return bool(config.torch_dtype == "bfloat16" or config.bf16 or config.fp16)


def _on_gpu(config: RunConfig) -> RunConfig:
    """The config with the precision of `bf16: auto` on a GPU, whatever this machine has."""
    return config.model_copy(update={"bf16": not config.fp16}) if config.bf16 == "auto" else config


def _request(config: RunConfig, model_config: Any, card: Card) -> Request:
    """The request for a card; plans that do not depend on its memory are the same for all cards."""
    folds = config.adapter == "lora" and not (_is_rounded(config) or config.load_in_8bit)
    return Request(config, model_config, memory=int(card.memory * _GIB) if folds else 0)


def room(card: Card, config: RunConfig) -> float:
    """Bytes that a step may have on the card: less its reserve, and what a colocated vLLM takes."""
    served = config.vllm.gpu_memory_utilization or 0.9
    shares = config.method.rows == "prompts" and config.trl.use_vllm and config.trl.vllm_mode == "colocate"
    return (card.memory * (1 - served if shares else 1) - _RESERVE) * _GIB


@dataclass(frozen=True)
class Fit:
    """The plan of a config on a card, and the changes with which it fits if it does not, with the plan of all of them.

    `changes` are texts; None if no combination of those that are known is enough.
    """

    plan: Plan
    room: float
    changes: list[str] | None
    changed: Plan

    @property
    def fits(self) -> bool:
        return self.plan.total <= self.room


def fit(config: RunConfig, model_config: Any, card: Card, planner: Planner) -> Fit:
    """Plan a step of the longest rows that `config` allows. Raises ModelError if that is not possible.

    What does not fit is planned again with one change after another, those with the least cost first; those that do not
    lower the peak by 1% are left out.
    """
    config = _on_gpu(config)
    first = planner(_request(config, model_config, card))
    if isinstance(first, str):
        raise ModelError(f"The step cannot be planned: {first}")
    limit, now, made, useless = room(card, config), first, [], set()
    while now.total > limit:
        for text, values in _candidates(config):
            if text in useless:
                continue
            plan = planner(_request(changed(config, values), model_config, card))
            if not isinstance(plan, str) and plan.total < 0.99 * now.total:
                now, config = plan, changed(config, values)
                made.append(text)
                break
            useless.add(text)
        else:
            return Fit(first, limit, None, now)
    return Fit(first, limit, made, now)


def _candidates(config: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    tokens = config.micro_batch_size * config.sequence_len
    if config.method.samples_blocks:
        rollouts = config.ebft.n_samples_per_prompt * config.ebft.generate_max_len / config.ebft.stride
        tokens = int(tokens * (1 + rollouts))
    yield from changes(config, tokens, on_gpu=True)
    if config.sequence_len >= _SHORTEST:
        yield f"sequence_len: {config.sequence_len // 2}", {"sequence_len": config.sequence_len // 2}


def planned(config: RunConfig, name: str, card: Card) -> Iterator[Check]:
    """Yield the plan of a config on a card as lines of the report; an error if the step does not fit."""
    model_config, source = model_config_of(config)
    with Planner() as planner:
        found = fit(config, model_config, card, planner)
    plan = found.plan
    counts = f"{plan.parameters:,} weights, of which {plan.trained:,} are trained"
    counts = counts if config.adapter is None else f"{plan.parameters:,} weights, and {plan.trained:,} of the adapter"
    yield Check("ok", "model", f"{config.base_model} by {source}: {counts}")
    for phase, use in plan.phases.items():
        elsewhere = f", and {gib(use.elsewhere)} on other devices" if use.elsewhere else ""
        work = f"{use.flops / 1e12:,.2f} TFLOP, {use.moved / 1e9:,.0f} GB read and written, {use.kernels:,.0f} kernels"
        yield Check("ok", f"peak memory, {phase}", f"{gib(use.peak)}{elsewhere}; {work}")
    least = floor(plan, card, config)
    if least is not None:
        parts = f"arithmetic {least.flops:.2f} s, memory traffic {least.moved:.2f} s, kernels {least.kernels:.2f} s"
        text = f"a step takes at least {least.total:.2f} s ({parts}), by data sheet and 10 µs a kernel"
        yield Check("ok", "time", text)
    text = f"{gib(plan.total)} at the peak, in {plan.peak}; {name} has room for {gib(found.room)}"
    if config.method.rows == "prompts" and config.trl.use_vllm:
        where = "shares the card" if config.trl.vllm_mode == "colocate" else "needs another card"
        text += f" (the vLLM server {where})"
    if found.fits:
        yield Check("ok", "memory", f"{text}. The step fits.")
    elif found.changes is None:
        yield Check("error", "memory", f"{text}. It does not fit, nor does it with any of the changes that are known.")
    else:
        changes = "".join(f"\n  - {change}" for change in found.changes)
        yield Check("error", "memory", f"{text}. It does not fit. With all of these it needs "
                    f"{gib(found.changed.total)}:{changes}")  # fmt: skip
