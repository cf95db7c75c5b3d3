"""TRL's CPOTrainer and ORPOTrainer on rows of token ids."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from torch import Tensor, nn

from ebft.preferences.collator import PairCollator
from ebft.preferences.over_trl.metrics import KeepsMetrics, Logged


class PreparedBatches(KeepsMetrics):
    """Mixin for CPOTrainer and ORPOTrainer with rows `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    use_dpo_data_collator: bool

    def __init__(
        self,
        model: nn.Module,
        *,
        args: Any,
        train_dataset: Dataset,
        processing_class: Any,
        eval_dataset: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        args.remove_unused_columns = False  # of the columns, transformers knows only those of the model's forward
        super().__init__(
            model,
            args=args,
            data_collator=PairCollator(processing_class.pad_token_id),
            # TRL tokenises with `map`, which would write into the folder of prepared rows. It gets one row instead.
            train_dataset=Dataset.from_list([train_dataset[0]]),
            eval_dataset=None if eval_dataset is None else Dataset.from_list([eval_dataset[0]]),
            processing_class=processing_class,
            **kwargs,
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.use_dpo_data_collator = True  # batches have the columns of TRL's own collator

    @staticmethod
    def tokenize_row(feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        """Return a row as it is: rows have been tokenised."""
        return feature

    def logged(self, mode: str) -> Logged:
        return self._stored_metrics[mode]

    def rows_behind(self, name: str, inputs: dict[str, Tensor]) -> int:
        return len(inputs["chosen_input_ids"])
