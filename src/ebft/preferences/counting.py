"""What the budget counts of preference methods."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ebft.monitor import CountsBudget, StopOnNonFinite


class CountsRows(CountsBudget, StopOnNonFinite):
    """Mixin that counts pairs, or completions with a label, as documents, and the FLOPs of the reference model."""

    ref_model: nn.Module | None = None

    def computing_models(self) -> list[nn.Module]:
        """Return the policy, and the reference model if it is not the policy without its adapter."""
        return [self.model] if self.ref_model is None else [self.model, self.ref_model]

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self.budget.add(documents=self.rows_behind("loss", inputs))
        return super().training_step(model, inputs, num_items_in_batch)
