"""What training a reward model and training a process reward model have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ebft.catalog import as_folder, is_gguf
from ebft.config.section import Section
from ebft.errors import ConfigError
from ebft.methods.method import EvaluationSampling, Method

if TYPE_CHECKING:
    from ebft.data.load import LoadedRows
    from ebft.methods.method import MethodConfig
    from ebft.methods.views import RowView
    from ebft.models.causal_lm import HeadType

CLASSES = 2  # of steps, such as wrong and correct


class HeadKeys(Section):
    """The keys of both kinds of reward models."""

    num_labels: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Number of outputs of the head: 1 with reward_model; with process_reward_model, the number of "
        f"classes of a step, by default {CLASSES}.",
    )


class Classifier(Method):
    """A method that trains a decoder with a head of a few outputs in place of the vocabulary."""

    can_be_compared = False
    generates_text = False

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        for key in ("load_in_4bit", "load_in_8bit", "deepspeed", "sample_packing", "group_by_length"):
            if getattr(config, key):
                yield f"{key} is not supported with {self.name}. Remove it."
        file = config.model_name
        if is_gguf(file):
            yield f"{file} is a GGUF file, which is not supported with {self.name}. {as_folder(file)}"
        if config.budget.generated_tokens is not None:
            yield f"budget.generated_tokens has no effect with {self.name}, which samples no tokens. Remove it."

    def resolve(self, config: MethodConfig) -> None:
        """One warning for what other methods read."""
        idle = [name for name in ("trl", "vllm", "evaluation") if name in config.model_fields_set]
        idle = ["ebft"] * bool(config.ebft.model_fields_set) + idle
        idle += ["train_on_inputs"] * config.train_on_inputs
        if idle:
            warnings.warn(f"{', '.join(idle)}: no effect with {self.name}.", stacklevel=2)

    def sampling(self, config: MethodConfig) -> EvaluationSampling:
        raise ConfigError(
            f"ebft evaluate compares language models; {self.name} trains a model that generates no text. Its loss and "
            "accuracy on held-out rows are logged in training: set test_datasets or val_set_size, with eval_strategy."
        )


class RewardModelKeys(HeadKeys):
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
    keys = RewardModelKeys
    offloads_activations = True
    class_ending = "ForSequenceClassification"
    pipeline_tag = "text-classification"
    arguments = "ebft.reward_models:RewardModelConfig"

    def summary(self, config: MethodConfig) -> str:
        return "the Bradley-Terry loss as a reward model"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.num_labels not in (None, 1):
            yield f"num_labels: {config.num_labels} is invalid with {self.name}, whose model has one score. Set 1."

    def head(self, config: MethodConfig) -> HeadType:
        from ebft.models.causal_lm import SCORE

        return SCORE

    def held_out_metrics(self, config: MethodConfig) -> tuple[str, ...]:
        return ("loss", "accuracy", "margin")

    def load_rows(self, config: MethodConfig, tokenizer: Any) -> LoadedRows:
        from ebft.data.reward_rows import load_comparisons

        return load_comparisons(config, tokenizer)

    def row_view(self, config: MethodConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.methods.views import ComparisonView

        return ComparisonView(tokenizer)

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        return {name: getattr(config, name) for name in ("center_rewards_coefficient", "activation_offloading")}

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.reward_models import RewardModelTrainer

        return RewardModelTrainer(model=model, **common)


class ProcessRewardModel(Classifier):
    """transformers' Trainer on steps whose last token is classified."""

    name = "process_reward_model: true"
    tag = "process-reward-model"
    rows = "steps"
    keys = HeadKeys
    class_ending = "ForTokenClassification"
    pipeline_tag = "token-classification"
    arguments = "transformers:TrainingArguments"

    def summary(self, config: MethodConfig) -> str:
        return "the cross-entropy of the classes of steps as a process reward model"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.num_labels == 1:
            yield f"num_labels: 1 is invalid with {self.name}, which classifies steps. Set 2 or more."

    def head(self, config: MethodConfig) -> HeadType:
        from ebft.models.causal_lm import step_head

        return step_head(self._classes(config))

    def _classes(self, config: MethodConfig) -> int:
        return CLASSES if config.num_labels is None else config.num_labels

    def held_out_metrics(self, config: MethodConfig) -> tuple[str, ...]:
        return ("loss", "accuracy")

    def load_rows(self, config: MethodConfig, tokenizer: Any) -> LoadedRows:
        from ebft.data.reward_rows import load_steps

        return load_steps(config, tokenizer, self._classes(config))

    def row_view(self, config: MethodConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        from ebft.methods.views import StepView

        return StepView(tokenizer)

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.data.batches import DocumentCollator
        from ebft.reward_models import ProcessRewardTrainer

        collator = DocumentCollator(tokenizer.pad_token_id, with_prompt_length=False)
        return ProcessRewardTrainer(model=model, data_collator=collator, **common)
