"""TRL's RewardTrainer with exact continuation, and with held-out metrics that are means over pairs."""

from __future__ import annotations

from typing import Any

from trl import RewardTrainer

from ebft.over_trainer import OverTrainer


class ResumesComparisons(OverTrainer, RewardTrainer):
    """RewardTrainer that keeps what it is to log, and the number of tokens so far, in checkpoints."""

    def running_state(self) -> dict[str, Any]:
        return super().running_state() | {
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
            "tokens": self._total_train_tokens,
        }

    def restore_running_state(self, state: dict[str, Any]) -> None:
        super().restore_running_state(state)
        self._metrics["train"].update(state.get("metrics", {}))
        self._total_train_tokens = state.get("tokens", 0)

    def drop_evaluation_metrics(self) -> None:
        """Discard TRL's metrics of an evaluation, which are means over batches of different sizes."""
        self._metrics["eval"].clear()
