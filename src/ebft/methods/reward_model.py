"""Reward models (`reward_model: true`): one score per text, trained on pairs with the Bradley-Terry loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ebft.methods.classifier import Classifier, HeadKeys

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig
    from ebft.data.load import LoadedRows
    from ebft.models.heads import Head
    from ebft.preview.view import RowView


class RewardKeys(HeadKeys):
    """The keys of `reward_model: true`."""

    center_rewards_coefficient: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="reward_model: weight of the mean squared sum of the two scores of a pair, which centres the "
        "scores at 0. If unset, 0.",
    )


class RewardModel(Classifier):
    """TRL's RewardTrainer on pairs of a chosen and a rejected text."""

    name = "reward_model: true"
    tag = "reward-model"
    rows = "comparisons"
    keys = RewardKeys
    offloads_activations = True
    class_ending = "ForSequenceClassification"
    pipeline_tag = "text-classification"

    def summary(self, config: RunConfig) -> str:
        return "the Bradley-Terry loss as a reward model"

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.num_labels not in (None, 1):
            yield f"num_labels: {config.num_labels} is invalid with {self.name}, whose model has one score. Set 1."

    def head(self, config: RunConfig) -> Head:
        from ebft.models.heads import SCORE

        return SCORE

    def held_out_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return ("loss", "accuracy", "margin")

    def load_rows(self, config: RunConfig, tokenizer: Any) -> LoadedRows:
        from ebft.data.reward_rows import load_comparisons

        return load_comparisons(config, tokenizer)

    def row_view(self, config: RunConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.preview.reward_rows import ComparisonView

        return ComparisonView(tokenizer)

    def own_arguments(self, config: RunConfig) -> dict[str, Any]:
        offloading = config.activation_offloading
        return {
            "center_rewards_coefficient": config.center_rewards_coefficient,
            "activation_offloading": offloading,
        }

    def arguments_class(self) -> type:
        from ebft.reward_models.comparisons import RewardModelConfig

        return RewardModelConfig

    def build_trainer(self, config: RunConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.reward_models.comparisons import RewardModelTrainer

        return RewardModelTrainer(model=model, **common)
