"""Process reward models (`process_reward_model: true`): the class of each step, trained with the cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ebft.methods.classifier import CLASSES, Classifier, HeadKeys

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig
    from ebft.data.load import LoadedRows
    from ebft.models.heads import Head
    from ebft.preview.view import RowView


class ProcessRewardModel(Classifier):
    """transformers' Trainer on steps whose last token is classified."""

    name = "process_reward_model: true"
    tag = "process-reward-model"
    rows = "steps"
    keys = HeadKeys
    class_ending = "ForTokenClassification"
    pipeline_tag = "token-classification"

    def summary(self, config: RunConfig) -> str:
        return "the cross-entropy of the classes of steps as a process reward model"

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.num_labels == 1:
            yield f"num_labels: 1 is invalid with {self.name}, which classifies steps. Set 2 or more."

    def head(self, config: RunConfig) -> Head:
        from ebft.models.heads import step_head

        return step_head(self._classes(config))

    def _classes(self, config: RunConfig) -> int:
        return CLASSES if config.num_labels is None else config.num_labels

    def held_out_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return ("loss", "accuracy")

    def load_rows(self, config: RunConfig, tokenizer: Any) -> LoadedRows:
        from ebft.data.reward_rows import load_steps

        return load_steps(config, tokenizer, self._classes(config))

    def row_view(self, config: RunConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.preview.reward_rows import StepView

        return StepView(tokenizer)

    def arguments_class(self) -> type:
        from transformers import TrainingArguments

        return TrainingArguments

    def build_trainer(self, config: RunConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.data.collator import DocumentCollator
        from ebft.reward_models.steps import ProcessRewardTrainer

        return ProcessRewardTrainer(model=model, data_collator=DocumentCollator(tokenizer.pad_token_id), **common)
