"""The task shared by all models of an evaluation: config, sampling settings, rows and downstream metrics."""

from __future__ import annotations

import copy
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ebft.config.user_functions import find_function, user_code
from ebft.data import load, prompts
from ebft.data.sources import RawRows, read_source
from ebft.errors import ConfigError
from ebft.scores import best_of
from ebft.structured.rollouts.turns import ReferenceLimit

if TYPE_CHECKING:
    from ebft.run.config.schema import RunConfig

KEY = "evaluation.metrics"
TAKEN = ("alignment", "reward")  # names with a built-in pass@k
Metric = Callable[[Any, list[Any], dict[str, Any]], float | None]


def load_metrics(names: list[str]) -> dict[str, Metric]:
    """Return the metrics by the name under which they are reported. It is the function's name, or its full import path
    if that name is not unique."""
    short = Counter(name.rpartition(".")[2] for name in set(names))
    short.update(TAKEN)
    return {last if short[last := name.rpartition(".")[2]] == 1 else name: find_function(KEY, name) for name in names}


def downstream_scores(
    metrics: dict[str, Metric], pass_at: list[int], prompt: Any, completions: list[Any], row: dict[str, Any]
) -> dict[str, Tensor]:
    """`NAME_pass@k` of the sampled completions and `NAME_greedy` of the last, for each metric that applies: (1,)."""
    found = {}
    for name, metric in metrics.items():
        values = [_value(name, metric, prompt, completion, row) for completion in completions]
        if None not in values:
            values = torch.tensor(values, dtype=torch.float64)
            found |= {f"{name}_pass@{k}": best_of(values[None, :-1], k) for k in pass_at}
            found[f"{name}_greedy"] = values[-1:]
    return found


def _value(name: str, metric: Metric, prompt: Any, completion: Any, row: dict[str, Any]) -> float | None:
    says = lambda happened: (
        f"{KEY}: {name} failed: {happened}. It is called as {name}(prompt, completions, row) with a "
        f"list of one completion, here {completion!r:.200}."
    )
    with user_code(f"{KEY}: {name}", ConfigError, says):
        value = metric(copy.deepcopy(prompt), [copy.deepcopy(completion)], copy.deepcopy(row))
        found = float(value) if isinstance(value, numbers.Real | np.bool_) else value
    if found is None or (isinstance(found, float) and math.isfinite(found)):
        return found
    said = repr(found)[:200] if isinstance(found, float | str) else type(found).__name__
    raise ConfigError(f"{KEY}: {name} returned {said} for {completion!r:.200}; it must return a finite number or None.")


@dataclass
class HeldOut:
    """Rows as in the evaluation during training; `documents[i]` is the index of the document of row i. Several rows may
    belong to one document, such as windows of a long text or turns of a chat."""

    rows: Dataset
    documents: list[int]
    entries: list[Any]

    @cached_property
    def raw(self) -> RawRows:
        """The documents: the rows of their data sources, with all columns."""
        return RawRows(self.entries, [read_source(entry) for entry in self.entries])


def load_held_out(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> HeldOut:
    """Load the config's held-out rows (`test_datasets`, or the `val_set_size` split).

    They are at most `evaluation.documents` documents. They have the columns of `load_prompt_rows` for methods with full
    completions, otherwise the columns of `load_token_rows`. Raises DataError if the config has no held-out data.
    """
    check_comparable(config)
    is_prompts = config.method.rows == "prompts"
    load_entry = prompts.prompt_rows if is_prompts else load.token_rows
    rows = load.load_held_out_section(config, load_entry(config, tokenizer))
    if config.evaluation.documents is not None:
        owner = np.asarray(rows["document"])
        rows = rows.select(np.flatnonzero(np.isin(owner, np.unique(owner)[: config.evaluation.documents])))
    documents = list(rows["document"])
    rows = prompts.unpack_rows(rows) if is_prompts else rows.remove_columns("document")
    return HeldOut(rows, documents, config.test_datasets or config.datasets)


def check_comparable(config: RunConfig) -> None:
    """Raise ConfigError for methods whose rows are neither documents nor prompts."""
    method = config.method
    if not method.generates_text:
        method.sampling(config)  # raises the error
    if not method.can_be_compared:
        metrics = ", ".join(f"eval_{name}" for name in method.held_out_metrics(config))
        raise ConfigError(
            f"ebft evaluate and ebft quantize read documents or prompts, but {method.name} trains on preference data. "
            f"Its held-out metrics ({metrics}) are computed in training: set val_set_size or test_datasets, and "
            "eval_steps or eval_on_start. To compare the models on texts, use a config without rl and with such data."
        )


@dataclass(frozen=True)
class Settings:
    """Settings shared by all models of an evaluation."""

    samples: int
    pass_at: list[int]
    temperature: float
    max_new_tokens: int
    by_reference: ReferenceLimit | None  # limit of completions by the longest reference; None: no such limit
    batch_size: int  # number of rows, each with all of its samples
    seed: int

    @classmethod
    def of(cls, config: RunConfig) -> Settings:
        """Return the settings of a config; raises ConfigError if a k of pass@k exceeds the number of samples."""
        wanted, of_run = config.evaluation, config.method.sampling(config)
        samples, pass_at = wanted.counts(of_run.samples)
        adaptive = of_run.by_reference is not None and wanted.max_new_tokens is None
        return cls(
            samples=samples,
            pass_at=pass_at,
            temperature=wanted.temperature or of_run.temperature,
            max_new_tokens=wanted.max_new_tokens or config.trl.max_completion_length,
            by_reference=ReferenceLimit(*of_run.by_reference) if adaptive else None,
            batch_size=config.eval_batch_size or config.micro_batch_size,
            seed=config.seed,
        )


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
