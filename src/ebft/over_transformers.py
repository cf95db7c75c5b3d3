"""All use of undocumented and private interfaces of transformers.

Undocumented names are imported in this file only, and private attributes are accessed in this file only;
tests/test_contracts.py checks both against the installed release.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.masking_utils import causal_mask_function
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import ModelOutput, is_flash_attn_2_available, is_flash_attn_3_available
from transformers.utils.quantization_config import QuantizationMethod

__all__ = [
    "INTEGRATION_TO_CALLBACK",
    "Conv1D",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "ModelOutput",
    "OptimizerNames",
    "QuantizationMethod",
    "SchedulerType",
    "causal_mask_function",
    "forget_title",
    "has_running_state",
    "is_flash_attn_2_available",
    "is_flash_attn_3_available",
    "load_weights",
    "override_attn_implementation",
    "read_gguf_metadata",
    "save_final_weights",
    "switch_attention",
    "takes_attention_functions",
    "use_one_gpu",
]


def has_running_state(causal_lm: PreTrainedModel) -> bool:
    """Whether layers keep a recurrent state of previous tokens instead of their keys and values."""
    return causal_lm._is_stateful


def use_one_gpu(args: TrainingArguments) -> None:
    """Prevent a process with several GPUs from using DataParallel, which would split batches that belong together."""
    args._n_gpu = min(args.n_gpu, 1)


def load_weights(trainer: Trainer, folder: str) -> None:
    """Load the weights or the adapter of a checkpoint into the trainer's model."""
    trainer._load_from_checkpoint(folder)


def save_final_weights(trainer: Trainer, folder: str) -> None:
    """Save the model and its tokenizer in `folder`, without a push to the Hub."""
    trainer.save_model(folder, _internal_call=True)


def forget_title(config: PretrainedConfig) -> None:
    """Remove the model title of a GGUF file from the configuration, since it is not the name of a folder."""
    if hasattr(config, "_model_name_or_path"):
        del config._model_name_or_path


def takes_attention_functions(causal_lm: PreTrainedModel) -> bool:
    """Whether the model's attention uses the functions registered with `AttentionInterface`."""
    return causal_lm._supports_attention_backend


def switch_attention(module: nn.Module, implementation: str) -> str:
    """Set the attention implementation of a module with a `config`, and return the previous one."""
    before = module.config._attn_implementation
    module.config._attn_implementation = implementation
    return before


@contextmanager
def override_attn_implementation(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Use another attention implementation ("eager", "sdpa", ...) inside the block; restored also after exceptions.

    For plain calls of a model. Strided passes switch the attention implementation themselves for every call.
    """
    before = switch_attention(model, implementation)
    try:
        yield
    finally:
        switch_attention(model, before)
