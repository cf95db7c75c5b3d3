"""Whether a step of a config fits on a card, in which phases its memory and its time are, and what to change.

`ebft doctor CONFIG --for h100` plans the step (plan.py) and compares it with the card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebft.errors import ConfigError, ModelError
from ebft.machine import gib
from ebft.models.load import load_model_config
from ebft.run.config.schema import RunConfig
from ebft.tools.doctor.environment import Attempt, Check
from ebft.tools.doctor.known import KNOWN, Card
from ebft.tools.doctor.memory import CHANGES_TRAINING, changed, changes
from ebft.tools.doctor.plan import BEFORE, Planner, Request, StepPlan

_GIB = 2**30
_KERNEL = 10e-6  # seconds that Python needs to start a kernel
_SHORTEST = 128  # tokens of a row that may be halved
_TIGHT = 0.9  # of the room; more than this is a warning
_RESERVE = 1.0  # GiB for the CUDA context, the libraries' workspaces and the allocator's gaps


def model_config_of(config: RunConfig) -> tuple[Any, str]:
    """The configuration of the base model, from its config.json or `KNOWN`, and which one. Raises ModelError."""
    try:
        return load_model_config(config), "config.json"
    except (ModelError, ConfigError, OSError) as error:
        name = re.sub("-(Instruct|Base)$", "", config.base_model)
        if (Path(config.base_model).expanduser() / "config.json").is_file():
            raise
        if name not in KNOWN:
            raise ModelError(
                f"{error} To plan without it, set base_model to a folder with its config.json (weights are not needed) "
                f"or to a model whose shape is known: {', '.join(KNOWN)}."
            ) from error
    from transformers import AutoConfig

    values = dict(KNOWN[name])
    return AutoConfig.for_model(values.pop("model_type"), **values), f"the known shape of {name}"


def floor(plan: StepPlan, card: Card, config: RunConfig) -> dict[str, float]:
    """The least seconds of an optimizer step by its FLOPs at the card's rate, its bytes at its bandwidth, and the
    launches of its kernels; empty if the rates of the card are not known."""
    rate = card.bfloat16 if _is_rounded(config) else card.float32
    if rate is None or card.bandwidth is None:
        return {}
    step = [use for name, use in plan.phases.items() if name not in (*BEFORE, "evaluation")]
    flops, moved, kernels = (sum(getattr(use, name) for use in step) for name in ("flops", "moved", "kernels"))
    return {"arithmetic": flops / rate, "memory traffic": moved / card.bandwidth, "kernels": kernels * _KERNEL}


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


def plan_on(config: RunConfig, model_config: Any, card: Card, planner: Planner) -> StepPlan:
    """Plan a step of the longest rows that `config` allows. Raises ModelError."""
    found = planner(_request(_on_gpu(config), model_config, card))
    if isinstance(found, str):
        raise ModelError(f"The step cannot be planned: {found}")
    return found


def with_changes(
    config: RunConfig, model_config: Any, card: Card, planner: Planner, now: StepPlan
) -> tuple[list[str] | None, StepPlan]:
    """The changes, as text, with which a step fits whose plan is `now`, and its plan after them. One change after
    another, the cheapest first, is made if it lowers the peak by 1%. None if all known changes are not enough."""
    config = _on_gpu(config)
    limit, made, useless = room(card, config), [], set()
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
            return None, now
    return made, now


def _candidates(config: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    tokens = config.micro_batch_size * config.sequence_len
    if config.method.samples_blocks:
        rollouts = config.ebft.n_samples_per_prompt * config.ebft.generate_max_len / config.ebft.stride
        tokens = int(tokens * (1 + rollouts))
    yield from changes(config, tokens, on_gpu=True)
    if config.sequence_len >= _SHORTEST:
        half = config.sequence_len // 2
        yield f"sequence_len: {half} {CHANGES_TRAINING}", {"sequence_len": half}


def planned(config: RunConfig, name: str, card: Card) -> Iterator[Check]:
    """Yield the plan of a config on a card as lines of the report; an error if the step does not fit."""
    found = Attempt("model", model_config_of, config, ok=lambda model: f"{config.base_model} by {model[1]}")
    yield from found.checks
    if found.failed:
        return
    model_config, limit = found.result[0], room(card, config)
    if config.method.rows == "prompts" and config.trl.use_vllm and config.trl.vllm_mode != "colocate":
        text = "trl.use_vllm: the vLLM server is not in this plan; it needs another GPU. With one GPU, set "
        yield Check("warning", "vLLM", f"{text}trl.vllm_mode=colocate vllm.gpu_memory_utilization=0.3")
    if config.attn_implementation not in (None, "sdpa"):
        text = f"attn_implementation: {config.attn_implementation} is planned as sdpa, without its fused kernels"
        yield Check("warning", "attention", f"{text}, which may need less memory and time")
    rows = f"{config.micro_batch_size:,} rows of up to {config.sequence_len:,} tokens"
    yield Check("ok", "plan", f"a step with micro-batches of {rows}; this takes a minute or more")
    with Planner() as planner:
        plan = plan_on(config, model_config, card, planner)
        yield from _described(plan, config, card)
        text = f"{_size(plan.total)} at the peak, in {plan.peak}; {name} has room for {_size(limit)}"
        if plan.total <= _TIGHT * limit:
            yield Check("ok", "memory", f"{text}. The step fits.")
            return
        if plan.total <= limit:
            tight = "The step fits, but it is tight: fragments of memory and rows of other lengths may need the rest."
            yield Check("warning", "memory", f"{text}. {tight}")
            return
        yield Check("error", "memory", f"{text}. It does not fit. Looking for changes with which it does ...")
        made, last = with_changes(config, model_config, card, planner, plan)
    if made is None:
        yield Check("warning", "changes", "it does not fit with any of the changes that are known")
    else:
        lines = "".join(f"\n  - {change}" for change in made)
        yield Check("ok", "changes", f"with all of these it needs {_size(last.total)}:{lines}")


def _size(size: float) -> str:
    """Bytes with a digit more than `gib`, since they are compared with the room of a card."""
    return f"{size / _GIB:.1f} GiB" if abs(size) >= _GIB else gib(size)


def _described(plan: StepPlan, config: RunConfig, card: Card) -> Iterator[Check]:
    """The lines of a plan: weights, phases, and the least time."""
    trained = f"{plan.trained:,} trained" if config.adapter is None else f"{plan.trained:,} in the adapter"
    yield Check("ok", "weights", f"{plan.parameters:,} in the model, {trained}")
    others = 0.0
    for phase, use in plan.phases.items():
        elsewhere = f", and {gib(use.elsewhere)} on other devices" if use.elsewhere else ""
        work = f"{use.flops / 1e12:,.2f} TFLOP, {use.moved / 1e9:,.0f} GB read and written, {use.kernels:,.0f} kernels"
        work += f"; {use.flops_elsewhere / 1e12:,.2f} TFLOP on other devices" if use.flops_elsewhere else ""
        others += use.flops_elsewhere if phase not in (*BEFORE, "evaluation") else 0
        yield Check("ok", f"peak memory, {phase}", f"{gib(use.peak)}{elsewhere}; {work}")
    least = floor(plan, card, config)
    if least:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in least.items())
        text = f"a step takes at least {max(least.values()):.2f} s ({parts}), by data sheet and 10 µs a kernel"
        text += f", and the time of {others / 1e12:,.2f} TFLOP on other devices, which is not known" if others else ""
        yield Check("ok", "time", text)
