"""The function `evaluate`, which evaluates and compares models on a config's held-out data."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ebft.config.schema import RunConfig
from ebft.data.lengths import longest_document
from ebft.errors import ConfigError, DataError, ModelError, NonFiniteLossError
from ebft.models.tokenizer import load_tokenizer
from ebft.scores import Scores
from ebft.tools.evaluation.measure import has_reference, measure_prompts, measure_tokens
from ebft.tools.evaluation.models import Subject, check_model, check_positions, load_subject, own_models
from ebft.tools.evaluation.notes import notes_on
from ebft.tools.evaluation.result import Evaluation, summarise
from ebft.tools.evaluation.task import KEY, Settings, Task, check_comparable, load_held_out, load_metrics


def evaluate(
    config: RunConfig, models: list[str] | None = None, after_each: Callable[[Evaluation], None] | None = None
) -> Evaluation:
    """Evaluate `models` (folders or hub ids of full models or adapters) on the config's held-out data.

    None evaluates the config's base model and the trained model in `output_dir`, if any. All models are evaluated on
    the same documents, with the same noise, in the feature space of the config's `base_model`. The metrics are
    cross-entropy, feature matching, and the config's `evaluation.metrics`, with bootstrap intervals over documents.
    Evaluated documents that a model was trained on, as far as this is known, and fewer than 8 documents give a warning,
    which is also in `notes` of the result.
    `after_each` is called with the evaluation of the models so far, since a later model may fail. Raises ConfigError,
    DataError or ModelError for errors that the user can correct.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError(f"evaluate() expects a RunConfig, got {config!r:.100}. Load it with load_config(path).")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("ebft evaluate supports a single process only. Start it without a launcher.")
    check_comparable(config)
    settings = Settings.of(config)
    metrics = load_metrics(config.evaluation.metrics)
    started = time.perf_counter()
    tokenizer = load_tokenizer(config)
    names = list(dict.fromkeys(models)) if models else own_models(config)
    for name in names:
        check_model(config, name, tokenizer)
    task = Task(config, settings, load_held_out(config, tokenizer), tokenizer, metrics)
    check_positions(config, names, longest_document(task.held_out.rows))
    check_measurable(task)
    notes = notes_on(names, task.held_out)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    measure = measure_prompts if config.method.rows == "prompts" else measure_tokens
    found: list[Scores] = []
    documents = sorted(set(task.held_out.documents))
    for name in names:
        found.append(_measured(name, measure, task))
        _free_memory()
        evaluation = summarise(names[: len(found)], found, settings, config, documents, time.perf_counter() - started)
        evaluation.notes = notes
        if after_each is not None:
            after_each(evaluation)
    return evaluation


def _measured(name: str, measure: Callable[[Task, Subject], Scores], task: Task) -> Scores:
    """Return the scores of one model; its name is added to errors."""
    try:
        return measure(task, load_subject(task.config, name, task.tokenizer))
    except (ModelError, NonFiniteLossError) as error:
        raise type(error)(f"--model {name}: {error}") from error


def check_measurable(task: Task) -> None:
    """Raise DataError, before sampling, for prompts without references or metrics, and for metrics without prompts."""
    rows: Any = task.held_out.rows
    if task.config.method.rows == "tokens":
        if task.metrics and not any(rows["prompt_length"]):
            raise DataError(
                f"{KEY} requires prompts to complete, but the held-out rows are text without prompts. Use rows with "
                "prompt and completion, or remove the metrics."
            )
    elif not task.metrics and not any(has_reference(row) for row in rows):
        raise DataError(
            "nothing to evaluate: the held-out prompts have no references, and evaluation.metrics is empty. Provide "
            "ground_truth, or set evaluation.metrics."
        )


def _free_memory() -> None:
    """Free memory for the next model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
