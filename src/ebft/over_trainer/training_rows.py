"""A warning if a run is resumed with training or evaluation rows that differ from those of its checkpoint."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import Trainer

from ebft.row_digest import describe_rows, difference

_ROWS, _HELD_OUT = "TrainingRows", "EvaluationRows"  # among the `stateful_callbacks` of trainer_state.json


class ComparesRows(Trainer):
    """Trainer that describes its rows in each checkpoint, and compares them when it is resumed."""

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found = super()._init_training_state(*args)
        self._compare_rows()
        return found

    def _compare_rows(self) -> None:
        """Warn if the rows are not those of the checkpoint, and describe them in the following ones."""
        changed = self._difference(_ROWS, self.train_dataset)
        if changed is not None:
            warnings.warn(
                f"The training data differ from those of the checkpoint: {changed}. Training continues from step "
                f"{self.state.global_step} at the same position in the new data, so rows may be repeated or left out. "
                "For an exact continuation, resume with the same datasets, val_set_size and sequence_len.",
                stacklevel=2,
            )
        changed = self._difference(_HELD_OUT, self.eval_dataset)
        if changed is not None:
            warnings.warn(
                f"The evaluation data differ from those of the checkpoint: {changed}. Evaluations cannot be compared "
                "with those before, of which the best checkpoint is one.",
                stacklevel=2,
            )

    def _difference(self, name: str, rows: Any) -> str | None:
        """How `rows` differ from those that the checkpoint describes, on the main process; then describe them."""
        now, saved = describe_rows(rows), self.state.stateful_callbacks.get(name)
        if now is None:
            return None
        self.state.stateful_callbacks[name] = now
        return difference(saved, now) if saved is not None and self.is_world_process_zero() else None
