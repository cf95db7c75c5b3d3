"""The trainer of a config, with its arguments and callbacks, for this machine."""

from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from ebft.health.callback import HealthCallback
from ebft.monitor import ConsoleMetrics, ProgressBar, StopAtBudget
from ebft.over_transformers import is_torch_tf32_available, use_one_gpu
from ebft.run.arguments import training_kwargs
from ebft.run.checks import Machine, launched_processes
from ebft.run.learning_rates import rates_of
from ebft.run.plugins import add_plugins
from ebft.run.stopping import stopping_callbacks
from ebft.run.wrapping import check_adapted_experts, check_wrapping
from ebft.serving.server import VLLMServer


def training_arguments(config: RunConfig, rows: int, has_eval: bool) -> TrainingArguments:
    """The training arguments for `rows` rows of training data.

    Raises ConfigError for errors that only transformers detects, such as an unknown optimizer.
    """
    kwargs = training_kwargs(config, this_machine(), rows, has_eval)
    try:
        args = config.method.arguments_class()(**kwargs)
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:
        raise ConfigError(f"The trainer does not accept these settings: {error}") from error
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
) -> Trainer:
    """The trainer of the config's method."""
    check_wrapping(config, model)
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
    trainer.rate_of = rates_of(config, trainer.model)
    trainer.add_callback(StopAtBudget(trainer.budget, config.budget))
    if config.health:
        trainer.add_callback(HealthCallback(config.method.samples_per_group(config), config.ebft.use_whitening))
    for callback in stopping_callbacks(config):
        trainer.add_callback(callback)
    add_plugins(trainer, config.plugins)
    for printer in (ProgressCallback, PrinterCallback):  # they would print every log again, as a raw dict
        trainer.remove_callback(printer)
    if not args.disable_tqdm:
        trainer.add_callback(ProgressBar)
    return trainer


def this_machine() -> Machine:
    """The properties of this machine that training arguments and checks depend on."""
    return Machine(
        has_accelerator=torch.accelerator.is_available(),
        supports_bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        processes=launched_processes(),
        devices=_devices(),
        supports_tf32=is_torch_tf32_available(),
    )


def _devices() -> tuple[str, ...]:
    if not torch.accelerator.is_available():
        return ("cpu",)
    kind = torch.accelerator.current_accelerator().type
    return ("cpu", kind, *(f"{kind}:{index}" for index in range(torch.accelerator.device_count())))
