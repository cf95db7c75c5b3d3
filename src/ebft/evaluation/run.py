"""One function that measures models side by side on a config's held-out data."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

import torch

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError, DataError, ModelError, NonFiniteLossError
from ebft.evaluation.downstream import KEY, load_metrics
from ebft.evaluation.models import Subject, check_model, load_subject, own_models
from ebft.evaluation.prompts import has_reference, measure_prompts
from ebft.evaluation.result import Evaluation, summarise
from ebft.evaluation.rows import load_held_out
from ebft.evaluation.settings import Settings
from ebft.evaluation.task import Task
from ebft.evaluation.tokens import measure_tokens
from ebft.models.tokenizer import load_tokenizer
from ebft.scores import Scores


def evaluate(
    config: RunConfig, models: list[str] | None = None, after_each: Callable[[Evaluation], None] | None = None
) -> Evaluation:
    """Measure `models` (folders or hub ids of whole models or adapters) on the config's held-out data.

    None is the config's base model, and what its run left in `output_dir`. All are measured on the same documents,
    with the same noise, in the feature space of the config's `base_model`: cross-entropy, feature matching, and the
    config's `evaluation.metrics`, with intervals by bootstrap over documents. `after_each` is given the evaluation of
    the models so far, as a later one may fail. Raises ConfigError, DataError or ModelError for what the user can put
    right.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError(f"evaluate takes a config, got {config!r:.100}. Load one: load_config(path).")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("ebft evaluate runs in one process. Start it without torchrun.")
    settings = Settings.of(config)
    metrics = load_metrics(config.evaluation.metrics)
    started = time.perf_counter()
    tokenizer = load_tokenizer(config)
    names = list(dict.fromkeys(models)) if models else own_models(config)
    for name in names:
        check_model(config, name, tokenizer)
    task = Task(config, settings, load_held_out(config, tokenizer), tokenizer, metrics)
    check_measurable(task)
    measure = measure_prompts if config.method.rows == "prompts" else measure_tokens
    found: list[Scores] = []
    documents = sorted(set(task.held_out.documents))
    for name in names:
        found.append(_measured(name, measure, task))
        _free_memory()
        evaluation = summarise(names[: len(found)], found, settings, config, documents, time.perf_counter() - started)
        if after_each is not None:
            after_each(evaluation)
    return evaluation


def _measured(name: str, measure: Callable[[Task, Subject], Scores], task: Task) -> Scores:
    """The scores of one model; errors about it say its name."""
    try:
        return measure(task, load_subject(task.config, name, task.tokenizer))
    except (ModelError, NonFiniteLossError) as error:
        raise type(error)(f"--model {name}: {error}") from error


def check_measurable(task: Task) -> None:
    """DataError before anything is sampled: prompts without references and metrics, or metrics without prompts."""
    rows = task.held_out.rows
    if task.config.method.rows == "tokens":
        if task.metrics and not any(rows["prompt_length"]):
            raise DataError(
                f"{KEY} measures completions of prompts, and these rows are text without one. Use rows of prompt and "
                "completion, or leave the metrics out."
            )
    elif not task.metrics and not any(has_reference(row) for row in rows):
        raise DataError(
            "the held-out prompts have no references, and there are no metrics of your own: nothing can be measured. "
            "Give ground_truth, or set evaluation.metrics."
        )


def _free_memory() -> None:
    """Make room for the next model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
