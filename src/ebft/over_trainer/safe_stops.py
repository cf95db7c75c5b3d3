"""Points at which training may be stopped, and the checkpoint of the last completed step that is saved then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerControl

from ebft.over_trainer.complete_checkpoints import CompletesCheckpoints
from ebft.over_trainer.random_state import random_state, set_random_state
from ebft.over_trainer.running_state import KeepsRunningState


class StopsSafely(KeepsRunningState, CompletesCheckpoints):
    """Trainer that can save the last completed step after an exception.

    `may_stop`: whether an exception may be raised now, after which `save_stopped` can save that state; not during an
    update, its log, and a save. `when_stoppable` is called when that becomes possible.
    """

    control: TrainerControl
    current_flos: float
    when_stoppable: Callable[[], None] = staticmethod(lambda: None)
    _remembered: dict[str, Any] | None = None

    def save_stopped(self) -> None:
        """Save a checkpoint of the last completed step, after an exception was raised where `may_stop` allows it."""
        if self.state.global_step == self._saved_step or self._remembered is None:
            return
        set_random_state(self._remembered["random"])
        self.current_flos, self.state.num_input_tokens_seen = self._remembered["flos"], self._remembered["tokens"]
        if self._remembered["evaluation"]:
            self.leave_evaluation_pending()
        self._is_stopping = True
        self._save_checkpoint(self.model_wrapped, trial=None)
        self._is_stopping = False
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def state_of_checkpoint(self) -> dict[str, Any]:
        return self._remembered["running"] if self._is_stopping else super().state_of_checkpoint()

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found = super()._init_training_state(*args)
        self._remembered = None
        return found

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._remember(evaluation=self.is_evaluation_due)
        self.may_stop = True
        self.when_stoppable()

    def _evaluate(self, *args: Any, skip_scheduler: bool = False, **kwargs: Any) -> dict[str, float]:
        """Evaluate at a point where training may be stopped; `skip_scheduler`: for eval_on_start."""
        if skip_scheduler and self.state.global_step > 0:  # resumed: the run has made it before its first step
            return {}
        if self.state.global_step > 0:  # there is no completed step to save before
            self._remember(evaluation=True)
        could_stop, self.may_stop = self.may_stop, True
        self.when_stoppable()
        metrics = super()._evaluate(*args, skip_scheduler=skip_scheduler, **kwargs)
        self.may_stop, self._evaluated_step = could_stop, self.state.global_step
        return metrics

    def _remember(self, evaluation: bool) -> None:
        """Keep what `save_stopped` needs; `evaluation`: whether the evaluation of this step is not finished."""
        self._remembered = {
            "random": random_state(),
            "flos": self.current_flos,
            "tokens": self.state.num_input_tokens_seen,  # TRL counts them when it samples, before the step is complete
            "running": self.running_state(),
            "evaluation": evaluation,
        }
