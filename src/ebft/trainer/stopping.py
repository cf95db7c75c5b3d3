"""Points at which training may be stopped, and the checkpoint of the last completed step that is saved then."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerControl

from ebft.errors import NonFiniteLossError
from ebft.trainer.checkpoints import CompletesCheckpoints
from ebft.trainer.resuming import KeepsRunningState, random_state, set_random_state


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


class StopOnNonFinite:
    """Mixin for a transformers Trainer: raises NonFiniteLossError before an update with a non-finite loss or gradient.

    Weights and saved checkpoints are then those of the last valid step. With fp16, infinite gradients are handled by
    the gradient scaler, which skips the update and reduces its scale.
    """

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise NonFiniteLossError(
                f"The loss is {loss.item()} at step {self.state.global_step + 1}, in a batch of {_describe(inputs)}. "
                + _HINT
            )
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not self.args.fp16 and not math.isfinite(norm):
            raise NonFiniteLossError(f"The gradient norm is {norm} at step {self.state.global_step + 1}. " + _HINT)
        return norm


def check_weights(model: nn.Module, anywhere: Callable[[bool], bool]) -> None:
    """Raise NonFiniteLossError if a trained weight is NaN or infinite, here or `anywhere`, on any process."""
    local = ((name, each.to_local() if hasattr(each, "to_local") else each) for name, each in model.named_parameters())
    found = [name for name, each in local if each.requires_grad and not torch.isfinite(each).all()]
    if anywhere(bool(found)):
        raise NonFiniteLossError(
            f"Weights are NaN or infinite after the last step{f' (first {found[0]})' if found else ''}, although its "
            "loss was finite, so the final model was not saved. A plugin changed them, the last update overflowed, or "
            "they were so in base_model. Check the plugins and base_model, or reduce learning_rate; an "
            "earlier checkpoint can be used as base_model or lora_model_dir."
        )


_HINT = (
    "The update was not applied, and saved checkpoints are valid. Check these documents and resume training, or "
    "start a new run from the weights of a checkpoint with a smaller learning_rate (lora_model_dir or base_model): "
    "resuming would keep the learning rate."
)


def _describe(inputs: dict[str, Any]) -> str:
    """Describe the documents of a batch by length and first tokens, so that they can be identified."""
    if isinstance(inputs, list):  # rows of prompts
        return "prompts that start with " + ", ".join(repr(str(row["prompt"])[:60]) for row in inputs[:3])
    side = "" if "input_ids" in inputs else "chosen_"  # of pairs
    ids = inputs[f"{side}input_ids"]
    mask = inputs.get(f"{side}attention_mask")
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    rows = "packed rows" if "position_ids" in inputs else "documents"
    return f"{rows} with {lengths} tokens that start with token ids {ids[:, :8].tolist()}"
