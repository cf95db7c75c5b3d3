"""What all models of an evaluation share: the config, how to sample, the rows, and the downstream metrics."""

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
    """Everything of an evaluation but the models."""

    config: RunConfig
    settings: Settings
    held_out: HeldOut
    tokenizer: PreTrainedTokenizerBase
    metrics: dict[str, Metric]

    def batches(self) -> Iterator[tuple[list[dict[str, Any]], list[int]]]:
        """Rows with their documents, `settings.batch_size` at a time."""
        rows, documents, size = self.held_out.rows, self.held_out.documents, self.settings.batch_size
        for start in range(0, len(rows), size):
            chosen = range(start, min(start + size, len(rows)))
            yield [rows[i] for i in chosen], [documents[i] for i in chosen]
