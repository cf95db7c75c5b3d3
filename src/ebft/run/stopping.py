"""Callbacks that end training before its last step: no better evaluations, or losses above a threshold."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback

from ebft.config.schema import RunConfig


def stopping_callbacks(config: RunConfig) -> list[TrainerCallback]:
    """The callbacks for `early_stopping_patience` and `loss_watchdog_threshold`."""
    found: list[TrainerCallback] = []
    if config.early_stopping_patience is not None:
        found.append(EarlyStopping(config.early_stopping_patience))
    if config.loss_watchdog_threshold is not None:
        found.append(LossWatchdog(config.loss_watchdog_threshold, config.loss_watchdog_patience or 3))
    return found


class EarlyStopping(EarlyStoppingCallback):
    """transformers' callback, which continues to count in a resumed run, and whose last step is saved."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.early_stopping_patience_counter = _counted(state.stateful_callbacks)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, metrics, **kwargs)
        if control.should_training_stop and self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_save |= args.save_strategy == "steps"
            if state.is_world_process_zero:
                tqdm.write(
                    f"Stopping at step {state.global_step}: {self.early_stopping_patience} evaluations without a "
                    f"better {args.metric_for_best_model} (early_stopping_patience)"
                )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best = f"checkpoint-{state.best_global_step}"
        if state.best_global_step is None or not args.load_best_model_at_end:
            return
        if Path(state.best_model_checkpoint or "").name != best:
            warnings.warn(
                f"The best evaluation was that of step {state.best_global_step}, but no checkpoint was saved there, so "
                "the result is not the best model. Set save_steps to eval_steps.",
                stacklevel=2,
            )


class LossWatchdog(TrainerCallback):
    """Stops training after `patience` logged losses above `threshold` in succession."""

    def __init__(self, threshold: float, patience: int) -> None:
        self.threshold, self.patience, self.above = threshold, patience, 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        self.above = self.above + 1 if logs["loss"] > self.threshold else 0
        if self.above == self.patience:
            control.should_training_stop = True
            if state.is_world_process_zero:
                tqdm.write(
                    f"Stopping at step {state.global_step}: the last {self.patience} logged losses are above "
                    f"{self.threshold:g} (loss_watchdog_threshold)"
                )


def stopped_early(config: RunConfig, checkpoint: Path) -> bool:
    """Whether the run of a checkpoint has reached `early_stopping_patience`."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    counted = _counted(state.get("stateful_callbacks", {}))
    return config.early_stopping_patience is not None and counted >= config.early_stopping_patience


def _counted(callbacks: dict[str, Any]) -> int:
    """The number of evaluations without a better metric, as saved in a trainer state."""
    return callbacks.get(EarlyStopping.__name__, {}).get("attributes", {}).get("early_stopping_patience_counter", 0)
