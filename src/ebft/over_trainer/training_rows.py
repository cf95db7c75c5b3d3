"""A warning if a run is resumed with training rows that differ from those of its checkpoint."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import Trainer

from ebft.row_digest import describe_rows, difference

_ROWS = "TrainingRows"  # among the `stateful_callbacks` of trainer_state.json


class ComparesRows(Trainer):
    """Trainer that describes its training rows in each checkpoint, and compares them when it is resumed."""

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found = super()._init_training_state(*args)
        self._compare_rows()
        return found

    def _compare_rows(self) -> None:
        """Warn if the training rows are not those of the checkpoint, and describe them in the following ones."""
        now, saved = describe_rows(self.train_dataset), self.state.stateful_callbacks.get(_ROWS)
        if now is None:
            return
        changed = difference(saved, now) if saved is not None else None
        if changed is not None and self.is_world_process_zero():
            warnings.warn(
                f"The training data differ from those of the checkpoint: {changed}. Training continues from step "
                f"{self.state.global_step} at the same position in the new data, so rows may be repeated or left out. "
                "For an exact continuation, resume with the same datasets, val_set_size and sequence_len.",
                stacklevel=2,
            )
        self.state.stateful_callbacks[_ROWS] = now
