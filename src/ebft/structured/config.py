"""The arguments of structured mode's trainers: TRL's GRPOConfig with the options that ebft declares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from trl import GRPOConfig

from ebft.config.options import (
    DropoutOption,
    FeatureOptions,
    StructuredOptions,
    ThinkingOption,
    validate_options,
    with_options,
)
from ebft.config.structured import RolloutOptions
from ebft.errors import ConfigError


class GRPORolloutOptions(RolloutOptions, StructuredOptions, DropoutOption):
    """Options of rollouts: where from, how fresh, how long."""


class EBFTOptions(FeatureOptions, ThinkingOption):
    """Options of the feature-matching reward and of the cross-entropy beside it."""


@dataclass
@with_options(GRPORolloutOptions)
class RolloutGRPOConfig(GRPOConfig):
    """TRL's GRPOConfig with ebft's rollouts: `vllm_mode`, `async_prefetch`, `adaptive_max_tokens` and so on."""

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.fp16:
            self.bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()  # TRL would ask for it anywhere
        if not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()
        validate_options(GRPORolloutOptions, self)
        # Reward functions read the dataset's columns by name.
        self.remove_unused_columns = False
        if self.async_prefetch and not self.uses_server:
            raise ConfigError(
                "async_prefetch generates on a server while the trainer trains. Set use_vllm with vllm_mode server or "
                "managed, or leave async_prefetch out."
            )
        samples = self.per_device_train_batch_size * self.steps_per_generation
        if samples % self.num_generations:
            raise ConfigError(
                f"{samples} completions per process and generation step (batch size {self.per_device_train_batch_size} "
                f"times {self.steps_per_generation} steps) do not hold whole groups of num_generations "
                f"{self.num_generations}. Change one of them so that the last divides the first."
            )

    @property
    def uses_server(self) -> bool:
        """Whether completions come from a vLLM server in a process of its own."""
        return self.use_vllm and self.vllm_mode != "colocate"


@dataclass
@with_options(EBFTOptions)
class EBFTConfig(RolloutGRPOConfig):
    """Arguments of EBFTTrainer: those of TRL's GRPO, of the rollouts, and of feature matching."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_options(EBFTOptions, self)

    def reward_options(self, names: Any) -> dict[str, Any]:
        """The values of the options `names`."""
        return {name: getattr(self, name) for name in names}


@dataclass
class AsyncEBFTConfig(EBFTConfig):
    """EBFTConfig for rollouts made ahead: from a vLLM server, while the batch before trains."""

    use_vllm: bool = field(default=True, metadata={"help": "Always: rollouts made ahead come from a vLLM server."})
    async_prefetch: bool = field(default=True, metadata={"help": "Always: this is what the class is for."})
