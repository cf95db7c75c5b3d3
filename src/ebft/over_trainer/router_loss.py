"""The load-balancing loss of a mixture of experts, with one weight for every split of a batch.

Models add it to the loss of every micro-batch. Trainer adds up the micro-batches of a step, whose cross-entropies are
already divided by the tokens of the whole step, so that the load-balancing loss would be multiplied by their number.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from ebft.data.transforms.rows import IGNORE
from ebft.errors import ModelError
from ebft.models.causal_lm import unwrap_adapter

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class WeighsRouterLoss(Trainer):
    """Trainer that weights the load-balancing loss of a micro-batch with its share of the step's labelled tokens."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        added = self.router_loss(outputs)
        if added is not None and num_items_in_batch is not None:  # otherwise, Trainer divides by the micro-batches
            share = labels.ne(IGNORE).sum() / num_items_in_batch
            loss = loss - self._scale() * added * (1 - share)
        return (loss, outputs) if return_outputs else loss

    def router_loss(self, outputs: Any) -> Tensor | None:
        """The term that the model has added to its loss, with its coefficient. None if it has added none."""
        found = outputs.get("aux_loss")
        if found is None or self.label_smoother is not None or self.compute_loss_func is not None:
            return None
        return coefficient(unwrap_adapter(self.model)) * found.to(outputs["loss"].device)

    def _scale(self) -> int:
        """The factor by which Trainer has multiplied the loss, which is averaged over processes afterwards."""
        if not self.args.average_tokens_across_devices:
            return 1
        return self.accelerator.num_processes // self.get_tp_size()


def coefficient(causal_lm: PreTrainedModel) -> float:
    """The weight with which a mixture of experts adds its load-balancing loss."""
    for holder in (causal_lm, causal_lm.config.get_text_config()):
        for name in _COEFFICIENTS:
            if hasattr(holder, name):
                return float(getattr(holder, name))
    raise ModelError(
        f"overrides_of_model_config.output_router_logits: the weight of the load-balancing loss of a "
        f"{causal_lm.config.model_type} model is not known ({' or '.join(_COEFFICIENTS)}). Set output_router_logits: "
        "false."
    )
