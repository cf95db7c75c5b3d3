"""Arguments of the strided trainer: transformers' TrainingArguments with the options of strided EBFT."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from ebft.config.options import StridedOptions
from ebft.config.rules import validate_options

# Those that determine where the blocks of a document are, what is sampled at each, and how it is computed.
BLOCK_OPTIONS = (
    "stride",
    "context_length",
    "generate_max_len",
    "n_samples_per_prompt",
    "min_completion_prefix",
    "merge_rollouts",
)


@dataclass
class StridedEBFTConfig(StridedOptions, TrainingArguments):
    """TrainingArguments with the options of strided EBFT, which are declared in `ebft.config.options`."""

    dataloader_pin_memory: bool | None = field(
        default=None,
        metadata={"help": "Pin the memory of batches for faster copies to a GPU. If unset, true if there is one."},
    )

    def __post_init__(self):
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = torch.cuda.is_available()
        super().__post_init__()
        validate_options(StridedOptions, self)
        # The collator's columns are read by name and need not be arguments of the model's forward.
        self.remove_unused_columns = False
