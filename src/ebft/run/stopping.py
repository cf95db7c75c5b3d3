"""Callbacks that end training before its last step: no better evaluations, or losses above a threshold."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback

from ebft.config.schema import RunConfig

_PATIENCE = 3  # of loss_watchdog_threshold


def stopping_callbacks(config: RunConfig) -> list[TrainerCallback]:
    """The callbacks for `early_stopping_patience` and `loss_watchdog_threshold`."""
    found: list[TrainerCallback] = []
    if config.early_stopping_patience is not None:
        found.append(EarlyStopping(config.early_stopping_patience))
    if config.loss_watchdog_threshold is not None:
        found.append(LossWatchdog(config.loss_watchdog_threshold, config.loss_watchdog_patience or _PATIENCE))
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
    """Stops training after `patience` logged losses above `threshold` in succession, and saves the last step."""

    def __init__(self, threshold: float, patience: int) -> None:
        self.threshold, self.patience = threshold, patience

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs or _losses_above(self.threshold, state.log_history) < self.patience:
            return
        control.should_training_stop = True
        control.should_save |= args.save_strategy == "steps"
        if state.is_world_process_zero:
            tqdm.write(
                f"Stopping at step {state.global_step}: the last {self.patience} logged losses are above "
                f"{self.threshold:g} (loss_watchdog_threshold)"
            )


def stopped_early(config: RunConfig, checkpoint: Path) -> str | None:
    """The key whose limit the run of a checkpoint has reached before its last step; None if it has not."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    counted, patience = _counted(state.get("stateful_callbacks", {})), config.early_stopping_patience
    if patience is not None and counted >= patience:
        return "early_stopping_patience"
    threshold, patience = config.loss_watchdog_threshold, config.loss_watchdog_patience or _PATIENCE
    if threshold is not None and _losses_above(threshold, state.get("log_history", [])) >= patience:
        return "loss_watchdog_threshold or loss_watchdog_patience"
    return None


def _losses_above(threshold: float, log_history: list[dict[str, float]]) -> int:
    """The number of logged losses above the threshold since the last one that is not."""
    losses = [entry["loss"] for entry in log_history if "loss" in entry]
    return next((count for count, loss in enumerate(reversed(losses)) if not loss > threshold), len(losses))


def _counted(callbacks: dict[str, Any]) -> int:
    """The number of evaluations without a better metric, as saved in a trainer state."""
    return callbacks.get(EarlyStopping.__name__, {}).get("attributes", {}).get("early_stopping_patience_counter", 0)
