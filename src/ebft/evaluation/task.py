"""The task shared by all models of an evaluation: config, sampling settings, rows and downstream metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from ebft.evaluation.downstream import Metric
from ebft.evaluation.rows import HeldOut
from ebft.evaluation.settings import Settings

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


@dataclass(frozen=True)
class Task:
    """An evaluation without its models."""

    config: RunConfig
    settings: Settings
    held_out: HeldOut
    tokenizer: PreTrainedTokenizerBase
    metrics: dict[str, Metric]

    def batches(self) -> Iterator[tuple[list[dict[str, Any]], list[int]]]:
        """Yield batches of `settings.batch_size` rows with their documents."""
        rows, documents, size = self.held_out.rows, self.held_out.documents, self.settings.batch_size
        for start in range(0, len(rows), size):
            chosen = range(start, min(start + size, len(rows)))
            yield [rows[i] for i in chosen], [documents[i] for i in chosen]
