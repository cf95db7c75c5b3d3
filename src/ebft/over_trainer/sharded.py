"""transformers' Trainer with FSDP2 on every device, and checkpoints that any number of processes can continue from.

This file uses private interfaces of transformers, which tests/test_contracts.py checks against the installed release.
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

from ebft.models.sharding import is_enabled, is_sharded, load_on_every_process, saves_parts, shard_on_cpu
from ebft.models.training_state import (
    check_fits,
    has_other_names,
    is_in_parts,
    load_optimizer,
    load_weights,
    save_whole_optimizer,
)
from ebft.over_trainer.pushing import PushesModel

_SCHEDULE = "scheduler.pt"


class ShardedTrainer(PushesModel):
    """Trainer whose checkpoints of FSDP2 are in parts, or have the files of a run without FSDP.

    Both can be loaded with and without FSDP.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is not None:
            shard_on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
            self.is_fsdp_enabled = is_enabled(self.accelerator)
            load_on_every_process()

    def saves_parts(self) -> bool:
        """Whether every process saves its part of the model and of the optimizer state."""
        return self.is_fsdp_enabled and is_sharded(self.model) and saves_parts(self.accelerator)

    def loads_here(self, folder: Path) -> bool:
        """Whether transformers cannot load the weights of a checkpoint into the model of this run."""
        if self.is_deepspeed_enabled:
            return False
        return self.is_fsdp_enabled or is_in_parts(folder) or has_other_names(self.model, folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`; into a checkpoint in parts, all of its files but the weights."""
        if not self.saves_parts():
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        weights = {} if self.is_saving else self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            self._save(folder, state_dict=weights)
            for path in Path(folder).glob("*model.safetensors") if self.is_saving else ():  # without tensors
                path.unlink()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled or self.saves_parts():
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_whole_optimizer(self.optimizer, Path(output_dir), is_writer=self.args.should_save)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULE)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if self.loads_here(folder):
            load_weights(self.model, folder)
        else:
            super()._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.loads_here(Path(resume_from_checkpoint)):
            load_weights(self.model, Path(resume_from_checkpoint))
        else:
            if not self.is_deepspeed_enabled:
                check_fits(self.model if model is None else model, Path(resume_from_checkpoint))
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        is_whole = checkpoint is None or not is_in_parts(Path(checkpoint))
        if is_whole and (checkpoint is None or not self.is_fsdp_enabled):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer(self.model, self.optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULE, weights_only=True))
