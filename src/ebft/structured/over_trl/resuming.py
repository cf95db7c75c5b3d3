"""Checkpoints of TRL's GRPOTrainer: the generation batch that is still trained on, and the reference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_model, save_model
from torch.utils.data import Sampler
from trl import GRPOTrainer

from ebft.errors import ConfigError
from ebft.over_trainer import OverTrainer
from ebft.structured.sampler import EpochSampler

_REFERENCE = "synced_reference.safetensors"  # in checkpoints, the weights of trl.sync_ref_model


class ResumesGeneration(OverTrainer, GRPOTrainer):
    """GRPOTrainer that continues exactly from a checkpoint, also within a generation batch."""

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochSampler.like(super()._get_train_sampler(dataset))

    def running_state(self) -> dict[str, Any]:
        """Return what is to be logged, the position in the generation batch, and the batch if it is still needed."""
        is_used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return super().running_state() | {
            "batches": self._batch_sizes(),
            "micro_batches": self._step,
            "generation_batch": None if is_used_up else self._buffered_inputs,
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
        }

    def restore_running_state(self, state: dict[str, Any]) -> None:
        super().restore_running_state(state)
        self._metrics["train"].update(state.get("metrics", {}))
        if state.get("batches") == self._batch_sizes():
            self._step, self._buffered_inputs = state["micro_batches"], state["generation_batch"]
        else:  # of an earlier release, of another number of processes, or with other batches
            self._step = self.state.global_step * self.args.gradient_accumulation_steps

    def save_shared(self, folder: Path) -> None:
        super().save_shared(folder)
        if self.args.sync_ref_model and not self._has_sharded_reference:
            save_model(self.accelerator.unwrap_model(self.ref_model), str(folder / _REFERENCE))

    def load_shared(self, folder: Path) -> None:
        super().load_shared(folder)
        if not self.args.sync_ref_model:
            return
        if self._has_sharded_reference or not (folder / _REFERENCE).is_file():
            reason = "sharded weights are not saved" if self._has_sharded_reference else f"there is no {_REFERENCE}"
            raise ConfigError(
                f"Training cannot be resumed from {folder} with trl.sync_ref_model: the reference model of this step, "
                f"which differs from the base model, is not in the checkpoint ({reason}). Set trl.sync_ref_model: "
                "false, or start a new run in another output_dir."
            )
        load_model(self.accelerator.unwrap_model(self.ref_model), str(folder / _REFERENCE))

    @property
    def _has_sharded_reference(self) -> bool:
        return self.is_deepspeed_enabled or self.is_fsdp_enabled

    def _batch_sizes(self) -> list[int]:
        """Return what the generation batch of a process, and the number of micro-batches so far, depend on."""
        args = self.args
        sizes = (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.steps_per_generation)
        return [*sizes, self.num_iterations, self.num_generations, args.world_size]
