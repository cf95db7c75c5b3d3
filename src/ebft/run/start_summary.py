"""The lines that `ebft train` prints before the first step: method, model, data, steps, output folder, adapter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn

from ebft.config.schema import RunConfig
from ebft.models.adapter_targets import fused_experts
from ebft.models.precision import weights_dtype
from ebft.rewards import whitening_tolerance
from ebft.run.arguments import planned_steps, use_bf16
from ebft.run.building import this_machine
from ebft.run.record import method_of


def start_summary(config: RunConfig, model: nn.Module, train_data: Any, eval_data: Any, checkpoint: str | None) -> str:
    """Return the summary of a run that starts with `model`, at the step of `checkpoint` if there is one."""
    machine, rows = this_machine(), 0 if config.streaming else len(train_data)
    steps = planned_steps(config, machine, rows)
    epochs = steps / config.method.steps_per_epoch(config, machine, rows)
    length = f"{epochs:.3g} {'epoch' if epochs == 1 else 'epochs'}"
    if config.streaming:
        tokens = config.sequence_len * config.micro_batch_size * config.gradient_accumulation_steps * machine.processes
        length = f"{tokens:,} tokens each"
    resumed = "" if checkpoint is None else f", resumed from {Path(checkpoint).name}"
    processes = f", {machine.processes} processes" if machine.processes > 1 else ""
    train = "a stream" if config.streaming else f"{rows:,} training {'row' if rows == 1 else 'rows'}"
    held_out = "none held out" if eval_data is None else f"{len(eval_data):,} held out"
    lines = "\n".join(
        (
            f"Method: {method_of(config)}{processes}",
            f"Model: {config.model_name}, {_parameters(model)}, {_dtype(config)}",
            f"Data: {train}, {held_out}",
            f"Steps: {steps:,} ({length}{resumed}); output in {config.output_dir}",
            *([f"Adapter: {_adapter(model)}"] if isinstance(model, PeftModel) else ()),
        )
    )
    return lines + _whitening(config)


def _whitening(config: RunConfig) -> str:
    """The line about rounding errors in whitening; empty if they are negligible."""
    ebft = config.ebft
    if not (config.method.compares_features(config) and ebft.use_whitening and ebft.whitening_space == "feature"):
        return ""
    dtype = weights_dtype(config)
    if dtype == torch.float32 and config.method.rows == "tokens":  # strided mode embeds in mixed precision
        dtype = torch.bfloat16 if use_bf16(config, this_machine()) else torch.float16 if config.fp16 else dtype
    if torch.finfo(dtype).bits > 16:
        return ""
    return (
        f"\nWhitening: features are computed in {str(dtype).removeprefix('torch.')}, so differences between samples "
        f"below {whitening_tolerance(dtype):.2g} of their size are rounding errors and dropped (docs/paper.md). "
        "Advantages of groups of similar samples differ from those of float32. ebft.whitening_space: sample avoids "
        "this."
    )


def _parameters(model: nn.Module) -> str:
    """The numbers of trained and of all parameters; weights in 4 bits are stored two in one element."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    total = sum(weight.numel() * (2 if type(weight).__name__ == "Params4bit" else 1) for weight in model.parameters())
    return f"{trained:,} of {total:,} parameters trained"


def _adapter(model: PeftModel) -> str:
    """What the adapter changes, by the last parts of names with their numbers, and which experts it does not."""
    parameters = list(model.targeted_parameter_names)
    adapted = [*(name.rpartition(".")[2] for name in model.targeted_module_names), *map(_last_two, parameters)]
    kind = model.peft_config["default"].peft_type.value.replace("LORA", "LoRA")
    size = f"{len(model.targeted_module_names)} modules"
    if parameters:
        size += f" and {len(parameters)} parameters"
    whole = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and any(own.requires_grad for own in module.parameters())
    ]
    experts = {name.replace(".base_layer", "").removeprefix("base_model.model.") for name in fused_experts(model)}
    frozen = sorted({_last_two(name) for name in experts.difference(parameters)})
    return "; ".join(
        (
            f"{kind} on {size}: {_counted(adapted)}",
            *([f"trained fully: {_counted(whole)}"] if whole else ()),
            *([f"fused experts not adapted: {', '.join(frozen)} (lora_target_parameters)"] if frozen else ()),
        )
    )


def _counted(names: list[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(Counter(names).items())) or "none"


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _dtype(config: RunConfig) -> str:
    if config.load_in_4bit or config.load_in_8bit:
        return "4 bits" if config.load_in_4bit else "8 bits"
    return str(weights_dtype(config)).removeprefix("torch.")
