"""What a method tells the rest of the package about itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ebft.config.section import Section

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from ebft.config.schema import RunConfig
    from ebft.run.checks import Machine
    from ebft.serving.server import VLLMServer

Rows = Literal["tokens", "prompts"]
CROSS_ENTROPY = ("ce_loss", "perplexity", "ce_loss_all", "perplexity_all")
# Of `ebft.scores.feature_scores`; the first decides which checkpoint is best unless told otherwise.
FEATURES = ("cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened", "alignment", "diversity")


@dataclass(frozen=True)
class EvaluationSampling:
    """How `ebft evaluate` samples completions, where its own section leaves it open."""

    samples: int
    temperature: float = 1.0
    options: dict[str, Any] | None = None  # top_p and the like
    extra: dict[str, Any] | None = None  # further keyword arguments of generate(); stop_token_ids
    regex: str | None = None  # of guided decoding
    by_reference: tuple[float, int] | None = None  # a limit: lengths of the reference, and the fewest tokens


class Method(ABC):
    """One way to train. Methods have no state: everything is in the config they are given."""

    name: ClassVar[str]  # as messages say it
    tag: ClassVar[str]  # of the model card
    rows: ClassVar[Rows]  # what a row of data becomes
    keys: ClassVar[type[Section]] = Section  # top-level keys of the config that it adds; other methods warn of them
    citation: ClassVar[str | None] = None  # BibTeX
    needs_reference: ClassVar[bool] = True  # whether every row of prompts has one
    samples_blocks: ClassVar[bool] = False  # whether rollouts start along a document, so that every row needs room

    # What a config says

    @abstractmethod
    def summary(self, config: RunConfig) -> str:
        """The method in a sentence of the model card, after "trained by"."""

    def conflicts(self, config: RunConfig) -> Iterator[str]:
        """Keys that contradict each other, a message for each, found when the config is loaded."""
        if config.budget.flops is not None and config.torch_compile:
            yield "budget.flops cannot be counted inside a compiled model. Remove it, or torch_compile."

    def resolve(self, config: RunConfig) -> None:  # noqa: B027 (a method may have nothing to resolve)
        """Warn once for each key without effect, and set what gives way to what will run."""

    def problems(self, config: RunConfig) -> Iterator[str]:
        """What cannot be trained here, a message for each, found before anything is loaded."""
        yield from ()

    def problems_here(self, config: RunConfig, machine: Machine) -> Iterator[str]:
        """What this machine lacks for it, a message for each."""
        yield from ()

    # What it measures

    @abstractmethod
    def held_out_metrics(self, config: RunConfig) -> tuple[str, ...]:
        """Names of the metrics of its evaluation, without their prefix `eval_`; the first tells the best checkpoint."""

    def sampling(self, config: RunConfig) -> EvaluationSampling:
        """How `ebft evaluate` samples."""
        return EvaluationSampling(config.ebft.n_samples_per_prompt)

    # What it trains with

    @abstractmethod
    def load_data(self, config: RunConfig, tokenizer: Any) -> tuple[Dataset, Dataset | None]:
        """Rows for training and for evaluation."""

    def steps_per_epoch(self, config: RunConfig, machine: Machine, rows: int) -> int:
        """Optimizer steps over `rows` rows."""
        batches = math.ceil(rows / (config.micro_batch_size * machine.processes))
        return max(1, math.ceil(batches / config.gradient_accumulation_steps))

    def own_arguments(self, config: RunConfig) -> dict[str, Any]:
        """What its training arguments hold beyond those of every method."""
        return {}

    @abstractmethod
    def arguments_class(self) -> type[TrainingArguments]:
        """The class of its training arguments."""

    @abstractmethod
    def build_trainer(
        self, config: RunConfig, model: Any, tokenizer: Any, server: VLLMServer | None, **common: Any
    ) -> Trainer:
        """Its trainer; `common` are the arguments that all trainers of transformers take."""


def pass_at(samples: int) -> tuple[str, ...]:
    """The held-out metrics of several samples."""
    return tuple(f"{name}_pass@{k}" for k in (1, samples) for name in ("alignment", "reward"))
