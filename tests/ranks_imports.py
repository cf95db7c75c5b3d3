"""What the processes of ranks.py have imported when they start."""

import peft  # noqa: F401
import torch
import transformers.trainer  # noqa: F401
import trl  # noqa: F401

import ebft.preferences.trainers
import ebft.run.training
import ebft.sft.trainer
import ebft.strided
import ebft.structured  # noqa: F401

torch.set_num_threads(1)
