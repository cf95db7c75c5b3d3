"""An evaluation that is due at the step of a checkpoint, and is made after resuming if it was not finished."""

from __future__ import annotations

import os

from ebft.over_trainer.sharded import ShardedTrainer

_PENDING = "PendingEvaluation"  # among the `stateful_callbacks` of trainer_state.json


class FinishesEvaluations(ShardedTrainer):
    """Trainer that notes an unfinished evaluation in its state, and makes it when training is resumed there."""

    is_interrupted: bool = False  # whether training ends before its last step
    _evaluated_step = -1

    def leave_evaluation_pending(self) -> None:
        """Note in the trainer state that the evaluation of this step is still to be made."""
        self.state.stateful_callbacks[_PENDING] = {"step": self.state.global_step}

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the end of this epoch, or of training, is evaluated after the step has been completed and saved."""
        ends_training = self.control.should_training_stop and not self.is_interrupted
        ends_epoch = self.state.epoch is not None and float(self.state.epoch).is_integer()
        at_end = self.args.eval_strategy == "epoch" and (ends_epoch or ends_training)
        return at_end and self._evaluated_step != self.state.global_step

    @property
    def has_pending_evaluation(self) -> bool:
        return _PENDING in self.state.stateful_callbacks

    def drop_pending_evaluation(self) -> None:
        """Remove the note from the trainer state."""
        del self.state.stateful_callbacks[_PENDING]

    def finish_evaluation(self, checkpoint: str) -> None:
        """Make the evaluation that was pending when `checkpoint` was saved, if there is one, with its random state."""
        if self.has_pending_evaluation:
            super()._load_rng_state(checkpoint)
            metrics = super()._evaluate(None, None)
            self._determine_best_metric(metrics, None)
            if self.state.best_global_step == self.state.global_step:
                folder = super()._get_output_dir(None)
                self.state.best_model_checkpoint = os.path.join(folder, f"checkpoint-{self.state.global_step}")
            self.drop_pending_evaluation()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.finish_evaluation(checkpoint)
