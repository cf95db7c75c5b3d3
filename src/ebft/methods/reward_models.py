"""What training a reward model and training a process reward model have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ebft.catalog import as_folder, is_gguf
from ebft.config.section import Section
from ebft.errors import ConfigError
from ebft.methods.method import EvaluationSampling, Method

if TYPE_CHECKING:
    from ebft.data.load import LoadedRows
    from ebft.methods.method import MethodConfig
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
    idle = ("ebft", "trl", "vllm", "evaluation")
    unsupported = {
        **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "it is not tested there"),
        **dict.fromkeys(("sample_packing", "group_by_length"), "a row has several sequences, or steps"),
    }

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        file = config.model_name
        if is_gguf(file):
            yield f"{file} is a GGUF file, which is not supported with {self.name}. {as_folder(file)}"

    def resolve(self, config: MethodConfig) -> None:
        self.warn_of_idle(config, *(["train_on_inputs"] if config.train_on_inputs else []))

    def sampling(self, config: MethodConfig) -> EvaluationSampling:
        raise ConfigError(f"ebft evaluate compares language models. Rows held out in training evaluate {self.name}.")


class RewardModelKeys(HeadKeys):
    """The keys of `reward_model: true`."""

    center_rewards_coefficient: Annotated[float, Field(gt=0)] | None = None
    """reward_model: weight of the mean squared sum of the two scores of a pair, which centres the scores at 0. If
    unset, 0."""


class RewardModel(Classifier):
    """TRL's RewardTrainer on pairs of a chosen and a rejected text."""

    name = "reward_model: true"
    tag = "reward-model"
    title = "the Bradley-Terry loss as a reward model"
    metrics = ("loss", "accuracy", "margin")
    rows = "comparisons"
    view = "ComparisonView"
    keys = RewardModelKeys
    offloads_activations = True
    class_ending = "ForSequenceClassification"
    pipeline_tag = "text-classification"
    arguments = "ebft.reward_models:RewardModelConfig"
    trainer = "ebft.reward_models:RewardModelTrainer"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.num_labels not in (None, 1):
            yield f"num_labels: {config.num_labels} is invalid with {self.name}, whose model has one score. Set 1."

    def head(self, config: MethodConfig) -> HeadType:
        from ebft.models.causal_lm import SCORE

        return SCORE

    def own_arguments(self, config: MethodConfig) -> dict[str, Any]:
        return {name: getattr(config, name) for name in ("center_rewards_coefficient", "activation_offloading")}


class ProcessRewardModel(Classifier):
    """transformers' Trainer on steps whose last token is classified."""

    name = "process_reward_model: true"
    tag = "process-reward-model"
    title = "the cross-entropy of the classes of steps as a process reward model"
    metrics = ("loss", "accuracy")
    rows = "steps"
    view = "StepView"
    keys = HeadKeys
    class_ending = "ForTokenClassification"
    pipeline_tag = "token-classification"
    arguments = "transformers:TrainingArguments"
    trainer = "ebft.reward_models:ProcessRewardTrainer"

    def conflicts(self, config: MethodConfig) -> Iterator[str]:
        yield from super().conflicts(config)
        if config.num_labels == 1:
            yield f"num_labels: 1 is invalid with {self.name}, which classifies steps. Set 2 or more."

    def head(self, config: MethodConfig) -> HeadType:
        from ebft.models.causal_lm import step_head

        return step_head(config.num_labels or CLASSES)

    def load_rows(self, config: MethodConfig, tokenizer: Any) -> LoadedRows:
        from ebft.data.preferences import load_steps

        return load_steps(config, tokenizer, config.num_labels or CLASSES)

    def build_trainer(self, config: MethodConfig, model: Any, tokenizer: Any, server: Any, **common: Any) -> Any:
        from ebft.data.documents import DocumentCollator

        collator = DocumentCollator(tokenizer.pad_token_id, with_prompt_length=False)
        return super().build_trainer(config, model, tokenizer, server, data_collator=collator, **common)
