"""The interface between a training method and the rest of the package."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ebft.config.section import Section
from ebft.data.transforms import Rows

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from ebft.config.schema import RunConfig
    from ebft.data.load import LoadedRows
    from ebft.methods.views import RowView
    from ebft.models.heads import Head
    from ebft.run.checks import Machine
    from ebft.serving.server import VLLMServer

CROSS_ENTROPY = ("ce_loss", "perplexity", "ce_loss_all", "perplexity_all")
# Metrics of `ebft.scores.feature_scores`; by default the first selects the best checkpoint.
FEATURES = ("cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened", "alignment", "diversity")


@dataclass(frozen=True)
class EvaluationSampling:
    """How `ebft evaluate` samples completions, unless the section `evaluation:` sets it."""

    samples: int
    temperature: float = 1.0
    options: dict[str, Any] | None = None  # such as top_p
    extra: dict[str, Any] | None = None  # additional keyword arguments of generate(), and stop_token_ids
    regex: str | None = None  # of guided decoding
    by_reference: tuple[float, int] | None = None  # length limit: multiple of the reference length, minimum tokens


class Method(ABC):
    """A training method. Methods are stateless: all settings are in the config that is passed to them."""

    name: ClassVar[str]  # as used in messages
    tag: ClassVar[str]  # of the model card
    rows: ClassVar[Rows]  # what a row of data is converted to
    keys: ClassVar[type[Section]] = Section  # top-level config keys that it adds; other methods warn about them
    citation: ClassVar[str | None] = None  # BibTeX
    needs_reference: ClassVar[bool] = True  # whether every row of prompts must have one
    phases: ClassVar[dict[str, str]] = {}  # methods of its trainer whose memory `ebft doctor` reports, by phase
    samples_blocks: ClassVar[bool] = False  # whether rollouts start within a document, so that a row must fit a block
    class_ending: ClassVar[str] = "ForCausalLM"  # of the names of transformers' classes that it trains
    pipeline_tag: ClassVar[str] = "text-generation"  # of the model card
    can_be_compared: ClassVar[bool] = True  # whether `ebft evaluate` compares models on its rows
    generates_text: ClassVar[bool] = True  # whether the trained model can be sampled from
    offloads_activations: ClassVar[bool] = False  # whether its trainer reads activation_offloading
    runs_plain_model: ClassVar[bool] = False  # whether all that a step runs is the model's own forward
    copy_name: ClassVar[str] = "feature network"  # of `copies_model`, as `ebft doctor` calls it
    reads_streams: ClassVar[bool] = False  # whether rows can be read while training runs (streaming)

    # Config

    @abstractmethod
    def summary(self, config: RunConfig) -> str:
        """Description of the method in the model card, following "trained by"."""

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        """Contradictions between keys, one message each, checked when the config is loaded."""
        if config.budget.flops is not None and config.torch_compile:
            yield (
                "budget.flops is not supported with torch_compile: FLOPs of compiled models cannot be counted. "
                "Remove one of them."
            )
        if self.offloads_activations and config.activation_offloading and config.torch_compile:
            yield (
                "activation_offloading is incompatible with torch_compile, which chooses itself what is kept for the "
                "backward pass. Remove one of them."
            )

    def resolve(self, config: RunConfig) -> None:  # noqa: B027 (a method may have nothing to resolve)
        """Warn once about each key without effect, and replace settings that other settings override."""

    def problems(self, config: RunConfig) -> Iterator[str]:
        """Reasons why a config cannot be trained, one message each, checked before anything is loaded."""
        yield from ()

    def problems_here(self, config: RunConfig, machine: Machine) -> Iterator[str]:
        """Requirements that this machine does not meet, one message each."""
        yield from ()

    # Evaluation

    @abstractmethod
    def held_out_metrics(self, config: RunConfig) -> tuple[str, ...]:
        """Names of its evaluation metrics, without the prefix `eval_`; the first selects the best checkpoint."""

    def sampling(self, config: RunConfig) -> EvaluationSampling:
        """How `ebft evaluate` samples."""
        return EvaluationSampling(config.ebft.n_samples_per_prompt)

    # Rows

    def load_rows(self, config: RunConfig, tokenizer: Any) -> LoadedRows:
        """Rows for training and for evaluation, which can be stored and read again."""
        if self.rows == "prompts":
            from ebft.data.prompts import load_prompt_rows

            return load_prompt_rows(config, tokenizer)
        from ebft.data.load import load_token_rows

        return load_token_rows(config, tokenizer)

    def arrange(self, config: RunConfig, train: Dataset) -> Any:
        """The training rows as the trainer receives them, such as packed. A deterministic function of `train`."""
        return train

    def check_rows(self, config: RunConfig, rows: LoadedRows) -> None:  # noqa: B027 (there may be nothing to check)
        """Check, before training, what the rows refer to, such as servers."""

    def samples_per_group(self, config: RunConfig) -> int | None:
        """Number of rollouts per prompt or anchor; None if the method samples none."""
        return None

    def compares_features(self, config: RunConfig) -> bool:
        """Whether rewards are computed with a feature network, which is a copy of the model without an adapter."""
        return False

    def copies_model(self, config: RunConfig) -> bool:
        """Whether a run without adapter has a frozen copy of the model in memory."""
        return self.compares_features(config)

    def keeps_logits(self, config: RunConfig) -> bool:
        """Whether a step has the logits of all tokens in memory."""
        return False

    @abstractmethod
    def row_view(self, config: RunConfig, tokenizer: Any) -> Callable[[Any], RowView]:
        """Return a function that shows a row of `arrange`, or of the evaluation rows, as the trainer reads it."""

    # Training

    def head(self, config: RunConfig) -> Head:
        """The output layer of the model that it trains."""
        from ebft.models.heads import LANGUAGE

        return LANGUAGE

    def services(self, config: RunConfig) -> AbstractContextManager[None]:
        """Other programs that run together with training: started and stopped with the block."""
        return nullcontext()

    def steps_per_epoch(self, config: RunConfig, machine: Machine, rows: int) -> int:
        """Number of optimizer steps per epoch of `rows` rows."""
        batches = math.ceil(rows / (config.micro_batch_size * machine.processes))
        return max(1, math.ceil(batches / config.gradient_accumulation_steps))

    def own_arguments(self, config: RunConfig) -> dict[str, Any]:
        """Training arguments in addition to those that all methods have."""
        return {}

    @abstractmethod
    def arguments_class(self) -> type[TrainingArguments]:
        """The class of its training arguments."""

    @abstractmethod
    def build_trainer(
        self, config: RunConfig, model: Any, tokenizer: Any, server: VLLMServer | None, **common: Any
    ) -> Trainer:
        """Its trainer; `common` are the arguments common to all trainers of transformers."""


def pass_at(samples: int) -> tuple[str, ...]:
    """The held-out metrics computed from several samples."""
    return tuple(f"{name}_pass@{k}" for k in (1, samples) for name in ("alignment", "reward"))
