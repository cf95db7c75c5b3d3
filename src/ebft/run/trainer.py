"""The trainer of a config, with its arguments and callbacks, for this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from ebft.config.keys.run import RATE_KEYS
from ebft.errors import ConfigError, ModelError, doing, warn
from ebft.health.callback import HealthCallback
from ebft.machine import Machine
from ebft.methods.base_config import deepspeed_settings, fsdp_arguments
from ebft.models.causal_lm import backbone_of, unwrap_adapter
from ebft.monitor.budget import StopAtBudget
from ebft.monitor.metrics import ConsoleMetrics, ProgressBar
from ebft.run.callbacks import callbacks_of, keep_going_without_trackers
from ebft.run.checks import check_adapted_experts, launched_processes, optimizer_arguments
from ebft.run.config.schema import RunConfig
from ebft.run.plugins import Plugins
from ebft.run.reporting import trackers
from ebft.serving.server import VLLMServer
from ebft.transformers_internals import Conv1D, checkpointing_argument, is_torch_tf32_available, use_one_gpu


def training_arguments(config: RunConfig, rows: int, has_eval: bool) -> TrainingArguments:
    kwargs = training_kwargs(config, this_machine(), rows, has_eval)
    with doing("passing the settings of the config to the trainer"):
        args = config.method.arguments_class()(**kwargs)
    use_one_gpu(args)
    return args


def build_trainer(
    config: RunConfig,
    args: TrainingArguments,
    model: Any,
    tokenizer: Any,
    train_data: Any,
    eval_data: Any,
    server: VLLMServer | None = None,
    plugins: Plugins | None = None,
) -> Trainer:
    """The trainer of the config's method, which the plugins follow."""
    check_adapted_experts(config, model)
    trainer = config.method.build_trainer(
        config,
        model,
        tokenizer,
        server,
        args=args,
        train_dataset=train_data,
        eval_dataset=eval_data,
        processing_class=tokenizer,
        callbacks=[ConsoleMetrics()],
    )
    keep_going_without_trackers(trainer)
    rate_of = rates_of(config, trainer.model)
    if rate_of is not None or config.optimizer == "muon":
        trainer.arrange = partial(grouped_optimizer, trainer.model, rate_of, config.optimizer == "muon")
    trainer.add_callback(StopAtBudget(trainer.budget, config.budget))
    if config.health:
        trainer.add_callback(HealthCallback(config.method.samples_per_group(config), config.ebft.use_whitening))
    for callback in callbacks_of(config):
        trainer.add_callback(callback)
    if plugins is not None:
        plugins.follow(trainer, planned_steps(config, this_machine(), 0 if config.streaming else len(train_data)))
    for printer in (ProgressCallback, PrinterCallback):  # they would print every log again, as a raw dict
        trainer.remove_callback(printer)
    if not args.disable_tqdm:
        trainer.add_callback(ProgressBar)
    return trainer


def this_machine() -> Machine:
    """The properties of this machine that training arguments and checks depend on."""
    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        devices += [kind, *(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))]
    return Machine(
        has_accelerator=torch.accelerator.is_available(),
        supports_bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        processes=launched_processes(),
        devices=tuple(devices),
        supports_tf32=is_torch_tf32_available(),
        supports_float8=not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9),
    )


_PRECISION = "ACCELERATE_MIXED_PRECISION"  # environment variable of accelerate
_SAME_NAME = (
    *("learning_rate", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("gradient_accumulation_steps", "max_steps", "seed", "data_seed", "dataloader_num_workers"),
    *("dataloader_pin_memory", "dataloader_prefetch_factor", "neftune_noise_alpha", "torch_compile_backend"),
    *("torch_compile_mode", "trackio_space_id", "fp16", "torch_compile", "ddp_timeout"),
    *("output_dir", "save_total_limit", "save_only_model", "load_best_model_at_end", "logging_steps"),
    *("hub_model_id", "hub_strategy", "hub_private_repo", "lr_scheduler_kwargs"),
)
_OTHER_NAME = {
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "wandb_name": "run_name",
    "trackio_project_name": "project",
}
_WATCHING = ("reduce_lr_on_plateau", "greedy")  # schedules that depend on the metric that selects the best checkpoint
# Held-out metrics for which greater is better; for all others lower is better.
_GREATER_IS_BETTER = ("accuracy", "alignment", "margin", "reward")


def training_kwargs(config: RunConfig, machine: Machine, rows: int, has_eval: bool) -> dict[str, Any]:
    """Arguments for TrainingArguments; `rows` is the number of training rows, for settings that count per epoch."""
    kwargs = {key: getattr(config, key) for key in _SAME_NAME}
    kwargs |= {name: getattr(config, key) for key, name in _OTHER_NAME.items()}
    kwargs["optim"] = "adamw_torch" if config.optimizer == "muon" else config.optimizer
    precision = "bf16" if use_bf16(config, machine) else "fp16" if config.fp16 else "no"
    given = os.environ.get(_PRECISION, "no").lower()  # if it is "no", accelerate reads its own config file
    if given not in ("no", precision):
        raise ConfigError(
            f"{_PRECISION} is {given:.60} in the environment, and {precision} by bf16 and fp16. Unset it."
        )
    checkpointing, sequential = checkpointing_argument(), "sequential" if config.curriculum_sampling else None
    kwargs |= {
        checkpointing: config.gradient_checkpointing,
        "optim_args": optimizer_arguments(config.optim_args),
        "per_device_eval_batch_size": config.eval_batch_size or config.micro_batch_size,
        "warmup_steps": config.warmup_steps if config.warmup_steps is not None else config.warmup_ratio,
        "bf16": precision == "bf16",
        "deepspeed": deepspeed_settings(config.deepspeed),
        "use_cpu": not machine.has_accelerator,
        "tf32": machine.supports_tf32 or None if config.tf32 else config.tf32,
        "train_sampling_strategy": "group_by_length" if config.group_by_length else sequential,
        "report_to": trackers(config),
        "ddp_find_unused_parameters": config.ddp_find_unused_parameters if machine.processes > 1 else None,
        "push_to_hub": True if config.hub_model_id else None,
    }
    if config.gradient_checkpointing and config.gradient_checkpointing_kwargs:
        details = config.gradient_checkpointing_kwargs.model_dump(exclude_none=True)
        kwargs[f"{checkpointing}_kwargs"] = details
    if config.cosine_min_lr_ratio is not None:
        kwargs["lr_scheduler_type"] = "cosine_with_min_lr"
        given = config.lr_scheduler_kwargs or {}
        kwargs["lr_scheduler_kwargs"] = {**given, "min_lr_rate": config.cosine_min_lr_ratio}
    per_epoch = steps_of_epoch(config, machine, rows)
    kwargs |= _schedule(config, "save", config.saves_per_epoch, per_epoch)
    if has_eval:
        kwargs |= _with_evaluations(config, kwargs, per_epoch)
    kwargs |= fsdp_arguments(config)
    kwargs |= config.method.own_arguments(config)
    if not machine.has_accelerator:  # as check_machine warns
        for name in ("activation_offloading", "use_liger_kernel", "liger_kernel_config"):
            kwargs.pop(name, None)
    return {name: value for name, value in kwargs.items() if value is not None}


def use_bf16(config: RunConfig, machine: Machine) -> bool:
    """Whether the run uses bfloat16: as configured, or for `auto`, if the GPU supports it and fp16 is not set."""
    if config.bf16 == "auto":
        return machine.supports_bf16 and not config.fp16
    return config.bf16


def planned_steps(config: RunConfig, machine: Machine, rows: int) -> int:
    """Number of optimizer steps of the run over `rows` rows."""
    if config.max_steps is not None:
        return config.max_steps
    return math.ceil(config.num_epochs * config.method.steps_per_epoch(config, machine, rows))


def steps_of_epoch(config: RunConfig, machine: Machine, rows: int) -> int:
    """The steps of an epoch, or of a run that ends before that."""
    return min(config.method.steps_per_epoch(config, machine, rows), planned_steps(config, machine, rows))


def _schedule(config: RunConfig, kind: str, times: int | None, steps_per_epoch: int) -> dict[str, Any]:
    """Strategy and steps of saving or evaluating: by steps if steps are given, otherwise every epoch."""
    steps = getattr(config, f"{kind}_steps")
    if times == 0:
        return {f"{kind}_strategy": "no"}
    if times is not None:
        steps = max(1, steps_per_epoch // times)
    strategy = getattr(config, f"{kind}_strategy") or ("epoch" if steps is None else "steps")
    return {f"{kind}_strategy": strategy, f"{kind}_steps": steps}


def _with_evaluations(config: RunConfig, kwargs: dict[str, Any], steps_per_epoch: int) -> dict[str, Any]:
    """The arguments of a run with held-out data: when it is evaluated, and which checkpoint is its best one."""
    kwargs = kwargs | _schedule(config, "eval", config.evals_per_epoch, steps_per_epoch)
    stops_early, best = config.early_stopping_patience is not None, config.load_best_model_at_end
    saves, evaluations = config.saves_per_epoch, config.evals_per_epoch
    if (best or stops_early) and saves and evaluations and evaluations % saves == 0:
        # Both are rounded down from times per epoch; transformers refuses, for example, 9 and 2 steps, from 1 and 4.
        kwargs["save_steps"] = kwargs["eval_steps"] * (evaluations // saves)
    metric, greater = config.metric_for_best_model, config.greater_is_better
    metric = metric or config.method.held_out_metrics(config)[0]
    if greater is None:  # transformers would guess it from the name
        greater = metric.removeprefix("eval_").startswith(_GREATER_IS_BETTER)
    kwargs |= {"metric_for_best_model": metric, "greater_is_better": greater, "eval_on_start": config.eval_on_start}
    if config.lr_scheduler in _WATCHING:
        kwargs["lr_scheduler_kwargs"] = {"mode": "max" if greater else "min"} | (kwargs["lr_scheduler_kwargs"] or {})
    if stops_early and best is None:  # the best model is the result if that is possible
        if config.save_only_model and (config.fsdp or config.deepspeed):
            problem = "save_only_model is set, with which checkpoints of a sharded model cannot be loaded. Remove it"
        elif not _saves_at_evaluations(kwargs):
            problem = "checkpoints are not saved at evaluations. Set save_steps to a multiple of eval_steps"
        else:
            return kwargs | {"load_best_model_at_end": True}
        warn(
            f"early_stopping_patience: the result is the last model, not the best one, because {problem}, or set "
            "load_best_model_at_end: false."
        )
    return kwargs


def _saves_at_evaluations(kwargs: dict[str, Any]) -> bool:
    """Whether each checkpoint has an evaluation, as transformers requires for loading the best one."""
    strategy, save, evaluate = kwargs["save_strategy"], kwargs.get("save_steps"), kwargs.get("eval_steps")
    if strategy in ("best", "no") or strategy != kwargs["eval_strategy"]:
        return strategy == "best"
    if strategy == "epoch" or save is None or evaluate is None or (save < 1) != (evaluate < 1):
        return strategy == "epoch"
    return (save * 1_000_000) % (evaluate * 1_000_000) == 0


def rates_of(config: RunConfig, model: nn.Module) -> Callable[[str], float] | None:
    """A function from the names of parameters to their learning rates; None if all have the same one.

    The first that applies: an element of `lr_groups`, the rate of embeddings, the rate of LoRA+. Raises ModelError if
    an element of `lr_groups` applies to no trained parameter.
    """
    if all(getattr(config, key) is None for key in RATE_KEYS):
        return None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for group in config.lr_groups or []:
        for part in group.modules:
            if not any(part in name for name in trained):
                raise ModelError(f"lr_groups: {part!r} is not part of the name of a trained parameter. Remove it.")
    causal_lm, rate = unwrap_adapter(model), config.learning_rate
    layers = [causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()]
    named = [(name, module) for name, module in causal_lm.named_modules() if any(module is layer for layer in layers)]
    embeddings = {name.rpartition(".")[2] for name, _ in named}  # such as embed_tokens and lm_head
    # PEFT's LoRA+ also multiplies the rate of vectors: the magnitudes of DoRA, biases and norms.
    vectors = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}

    def rate_of(name: str) -> float:
        for group in config.lr_groups or []:
            if any(part in name for part in group.modules):
                return group.lr
        if config.loraplus_lr_ratio is not None and "lora_embedding_" in name:
            return config.loraplus_lr_embedding or 1e-6
        if any(f".{part}." in f".{name}" for part in embeddings):
            if config.embedding_lr is not None:
                return config.embedding_lr
            if config.embedding_lr_scale is not None:
                return rate * config.embedding_lr_scale
        if config.loraplus_lr_ratio is not None and ("lora_B" in name or name in vectors):
            return rate * config.loraplus_lr_ratio
        return rate

    return rate_of


def grouped_optimizer(
    model: nn.Module, rate_of: Callable[[str], float] | None, with_muon: bool, optimizer: Optimizer
) -> Optimizer:
    """A new optimizer with a group for each learning rate; the optimizer's is first, and logged. Or Muon."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups if rate_of is not None else []:
        by_rate: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(rate_of(names[id(parameter)]), []).append(parameter)
        found += [{**group, "params": parameters, "lr": rate} for rate, parameters in by_rate.items()]
    if found:
        optimizer.param_groups[:] = sorted(found, key=lambda group: group["lr"] != optimizer.defaults["lr"])
    return Muon(optimizer, model) if with_muon else optimizer


class Muon(Optimizer):
    """`torch.optim.Muon` for the matrices of `model`, with steps as long as AdamW's (Liu et al. 2025, arXiv:2502.16982,
    section 2.2), and AdamW for its vectors, embeddings, output layers, and experts in one tensor.

    `optimizer`: an AdamW with all trained parameters, whose groups and settings are kept.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        layers = backbone_of(unwrap_adapter(model)).modules()
        inner = {id(layer.weight) for layer in layers if isinstance(layer, (nn.Linear, Conv1D))}
        groups = [
            {**group, "params": own, "is_inner": flag}
            for group in optimizer.param_groups
            for flag in (True, False)
            if (own := [weight for weight in group["params"] if (id(weight) in inner) is flag])
        ]
        self._parts = torch.optim.Muon([nn.Parameter(torch.empty(1, 1))], adjust_lr_fn="match_rms_adamw"), AdamW(groups)
        super().__init__(groups, self._parts[0].defaults | optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part, is_inner in zip(self._parts, (True, False)):
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["is_inner"] is is_inner]
            part.step()
        return loss
