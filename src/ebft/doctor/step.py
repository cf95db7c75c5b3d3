"""One training step of a config on its longest rows, with the peak memory of each phase. Nothing is saved."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import TrainerCallback

from ebft.config.schema import RunConfig
from ebft.doctor.rows import longest_rows
from ebft.models.base import load_model
from ebft.monitor import ConsoleMetrics
from ebft.monitor.phases import PhaseMemory
from ebft.run.keys import BudgetSection
from ebft.run.training import build_trainer, this_machine, training_arguments
from ebft.serving.managed import await_ready, managed_server

_MOST_MICRO_BATCHES = 2  # the second one has the gradients of the first in memory; further ones need no more
# Keys that save, evaluate, report or end early, and their values for the step.
_NOTHING_SAVED = {
    "max_steps": 1,
    "save_strategy": "no",
    "save_steps": None,
    "saves_per_epoch": None,
    "resume_from_checkpoint": None,
    "load_best_model_at_end": False,
    "hub_model_id": None,
    "report_to": None,
    "use_tensorboard": False,
    "use_wandb": False,
    "use_trackio": False,
    "wandb_project": None,
    "plugins": [],
    "health": False,
    "logging_steps": 1,
}


def measure_step(config: RunConfig, tokenizer: Any, data: Any) -> PhaseMemory:
    """Load the model, train for one step on the longest rows of `data`, and return the peak memory of its phases.

    Raises the errors of training; torch.OutOfMemoryError, or RuntimeError on the CPU, if the memory does not suffice.
    """
    memory = PhaseMemory()
    with memory.phase("before loading"):  # Python, libraries and data
        rows = longest_rows(config, data)
    with tempfile.TemporaryDirectory(prefix="ebft-doctor-") as folder:
        config = without_output(config, folder)
        settings = config.server_settings if config.manages_server else None
        managed = managed_server(settings, folder, torch.cuda.device_count(), this_machine().processes)
        with config.method.services(config), managed as server:
            args = training_arguments(config, rows=len(rows), has_eval=False)
            args.disable_tqdm = True
            with memory.phase("model"):
                model = load_model(config, tokenizer, gradient_checkpointing=config.gradient_checkpointing)
            await_ready(server, config.trl.vllm_server_timeout)
            with memory.phase("trainer and feature network"):
                trainer = build_trainer(config, args, model, tokenizer, rows, None, server)
            for name, method in config.method.phases.items():
                setattr(trainer, method, memory.measured(name, getattr(trainer, method)))
            trainer.remove_callback(ConsoleMetrics)
            trainer.add_callback(_OptimizerPhase(memory))
            with memory.phase("loss and backward"):
                trainer.train()
    return memory


def without_output(config: RunConfig, folder: str) -> RunConfig:
    """Return the config for one step that saves and reports nothing outside of `folder`."""
    changes = _NOTHING_SAVED | {"output_dir": folder, "budget": BudgetSection()}
    if config.method.rows == "tokens":
        changes["gradient_accumulation_steps"] = min(config.gradient_accumulation_steps, _MOST_MICRO_BATCHES)
    changes["ebft"] = config.ebft.model_copy(update={"log_completions": False})
    # A step that is skipped because all rewards are equal would not need the memory of others.
    changes["trl"] = config.trl.model_copy(update={"log_completions": False, "skip_zero_advantage_batches": False})
    return config.model_copy(update=changes)


class _OptimizerPhase(TrainerCallback):
    """Measures the update of the weights as a phase."""

    def __init__(self, memory: PhaseMemory) -> None:
        self.memory = memory

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.begin("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.end()


def savings(config: RunConfig) -> list[str]:
    """Return changes to the config that lower its memory, those with the least cost in quality first."""
    found = []
    size = config.micro_batch_size
    if size > 1:
        smaller = max(part for part in range(1, size) if size % part == 0)
        accumulation = config.gradient_accumulation_steps * size // smaller
        found.append(f"micro_batch_size: {smaller} with gradient_accumulation_steps: {accumulation} (same step)")
    if config.method.samples_blocks and config.ebft.rollout_tokens_per_pass is None:
        found.append("ebft.rollout_tokens_per_pass: 4096 or lower, which computes rollouts in parts (same step)")
    if not config.gradient_checkpointing:
        found.append("gradient_checkpointing: true, which recomputes activations in the backward pass")
    on_gpu = torch.cuda.is_available()
    if config.adapter is None and config.method.compares_features(config) and on_gpu and not config.ebft.feature_device:
        found.append("ebft.feature_device: cpu, or another GPU, for the frozen copy of the model")
    if config.bf16 is not True and config.torch_dtype != "bfloat16":
        found.append("bf16: true, or torch_dtype: bfloat16 for weights of half the size")
    if config.adapter is None:
        found.append("adapter: lora, without gradients, optimizer state or a frozen copy of the base model")
    elif on_gpu and not (config.load_in_4bit or config.load_in_8bit):
        found.append("adapter: qlora with load_in_4bit: true")
    if config.adapter is None and on_gpu and "8bit" not in config.optimizer:
        found.append("optimizer: adamw_bnb_8bit")
    found.append(f"sequence_len below {config.sequence_len}")
    return found
