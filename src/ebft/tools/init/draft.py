"""The draft of a new config: a batch that fits the memory, and the commented YAML file of its keys."""

import contextlib
import copy
import io
import json
import math
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from datasets import Dataset
from ruamel.yaml.error import YAMLError

from ebft.errors import doing, shortened
from ebft.files import write_text
from ebft.machine import available_memory, gib
from ebft.methods.views import one_line
from ebft.models.pretrained import load_tokenizer
from ebft.run.checks import check_runnable
from ebft.run.config.reference import option_groups
from ebft.run.config.schema import GROUPS, RunConfig, parse_yaml
from ebft.run.trainer import this_machine
from ebft.tools.doctor.memory import changed, changes, needs
from ebft.tools.doctor.rows import LongestRows, PromptLength, longest_rows, row_lengths

# Keys that need evaluation rows.
_OF_EVALUATIONS = (
    *("eval_on_start", "evals_per_epoch", "load_best_model_at_end", "metric_for_best_model", "save_strategy"),
    "early_stopping_patience",
)
_SAMPLE = 400  # rows that are measured
_LONGEST = 4096  # tokens of a row, unless it is set
WINDOW = 1024  # tokens of a window of text
_UNLIMITED = 2**20  # tokens
_CHARACTERS = 3  # of a token, where there is no tokenizer
_ROLLOUTS = ("n_samples_per_prompt", "generate_max_len", "max_completion_length")  # keys that are not lowered
_ROOM = 0.7  # of the free memory: activations are estimated roughly


@dataclass
class Draft:
    """The values of a config, a comment of each dotted key that needs one, and what to tell the user."""

    values: dict[str, Any]
    comments: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, comment: str | None = None) -> None:
        """Set a top-level key, with a comment."""
        self.values[key] = value
        if comment is not None:
            self.comments[key] = comment


@dataclass(frozen=True)
class GivenDataset:
    """A dataset that was given: its entry, its rows, and the split of the same source to evaluate on, if any."""

    entry: dict[str, Any]
    rows: Dataset
    held_out: str | None


def run_length(values: dict[str, Any], count: int) -> Iterator[str]:
    """A note about the number of steps of the run, from the number of rows, with the held-out ones."""
    with warnings.catch_warnings(action="ignore"):
        config = RunConfig.from_dict(copy.deepcopy(values))
    if config.max_steps is None:
        rows = count - int(config.val_set_size) if config.val_set_size >= 1 else count
        steps = math.ceil(config.method.steps_per_epoch(config, this_machine(), max(1, rows)) * config.num_epochs)
        yield f"Steps: about {steps:,}. `ebft doctor` measures one, and says how long the run takes"


def windows(sources: list[GivenDataset]) -> int:
    """About how many windows the texts are cut into, from a sample."""
    return sum(step * math.ceil(tokens / WINDOW) for step, tokens in _estimated(sources))


def _estimated(sources: list[GivenDataset]) -> Iterator[tuple[int, float]]:
    """The tokens of a sample of the rows, by their characters, each with the number of rows that it stands for."""
    for source in sources:
        step = max(1, len(source.rows) // _SAMPLE)
        yield from ((step, _count(row) / _CHARACTERS) for row in source.rows.select(range(0, len(source.rows), step)))


def fit_to_memory(
    found: Draft, given: dict[str, Any], sources: list[GivenDataset], is_text: bool, tokenizer: Any, model_config: Any
) -> None:
    """Set the length of rows, and what fits the memory, unless they are given. Raises ConfigError for wrong values."""
    longest = None if model_config is None else getattr(model_config.get_text_config(), "max_position_embeddings", None)
    limit = min(_LONGEST, longest or _LONGEST)
    if is_text or tokenizer is None:
        rows, lengths = None, [int(tokens) for _, tokens in _estimated(sources)]
    else:
        rows, lengths = _sampled(found, sources)
    if "sequence_len" not in given:
        total = [one.prompt + one.reference if isinstance(one, PromptLength) else one for one in lengths]
        _set_length(found, total, min(limit, WINDOW) if is_text else limit, is_text)
    sets_completion = "max_completion_length" in (given.get("trl") or {})
    if rows is not None and isinstance(lengths[0], PromptLength) and not sets_completion:
        # The longest completion to sample: 95 of 100 references are not longer.
        ordered = sorted(max(reference for _, reference in each.turns) for each in lengths)
        usual = ordered[math.ceil(0.95 * len(ordered)) - 1]
        default = found.values["trl"]["max_completion_length"]
        length = min(default, max(32, math.ceil(usual / 32) * 32)) if usual else default
        found.values["trl"]["max_completion_length"] = length
        found.comments["trl.max_completion_length"] = f"95% of the references have at most {usual} tokens"
    config = RunConfig.from_dict(copy.deepcopy(found.values))
    if model_config is None:
        return
    if rows is None:
        ids = [0] * config.sequence_len
        data = Dataset.from_list([{"input_ids": ids, "prompt_length": 0, "turn_spans": []}] * config.micro_batch_size)
        longest_of = LongestRows(data, (), config.sequence_len)
    else:
        longest_of = longest_rows(config, rows, lengths)
    _fit_memory(found, given, config, model_config, longest_of)


def _count(value: Any) -> int:
    """The characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_count, parts))


def _sampled(found: Draft, sources: list[GivenDataset]) -> tuple[Dataset, list[int] | list[PromptLength]]:
    """Rows of a sample of the data as the method reads them, and their lengths. Raises DataError for unusable rows."""
    values = copy.deepcopy(found.values) | {"sequence_len": _UNLIMITED, "val_set_size": 0, "test_datasets": []}
    for key in _OF_EVALUATIONS:
        values.pop(key, None)
    for entry, source in zip(values["datasets"], sources):
        if "shards" not in entry:
            entry["shards"] = max(1, len(source.rows) // _SAMPLE)
    config = RunConfig.from_dict(values)
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        tokenizer = load_tokenizer(config)  # with the chat template and special tokens of the config
        rows, _, reports = config.method.load_rows(config, tokenizer)
    if (dropped := reports[0].mostly_dropped()) is not None:
        found.notes.append(f"Rows: {dropped}")
    return rows, row_lengths(config, tokenizer, rows)


def _set_length(found: Draft, lengths: list[int], limit: int, is_text: bool) -> None:
    """The length below which 99 of 100 rows are, as a multiple of 64."""
    ordered = sorted(lengths)
    usual = ordered[math.ceil(0.99 * len(ordered)) - 1]
    length = min(limit, max(64, math.ceil((usual + 1) / 64) * 64))
    longer = sum(each > length for each in ordered)
    words = f"the longest row has about {ordered[-1]:,} tokens (measured on {len(ordered):,})"
    if is_text:
        words += "; longer texts are cut into windows" if longer else ""
    elif longer:
        words += f"; {longer / len(ordered):.0%} are longer"
    found.set("sequence_len", length, words)
    found.notes.append(f"sequence_len: {length}: {words}")


def _fit_memory(found: Draft, given: dict[str, Any], config: RunConfig, model_config: Any, rows: LongestRows) -> None:
    """Change what lowers the memory of a step until it fits, first what leaves the step the same."""
    try:
        needed = needs(config, model_config, rows)
    except (ValueError, RuntimeError, AttributeError) as error:
        found.notes.append(f"Memory: cannot be estimated for this model ({shortened(str(error))})")
        return
    estimate = needed.now
    free, where = available_memory(estimate.placed_on)
    if free is None:
        return
    while estimate.total > _ROOM * free:
        for _, change in changes(config, rows.step_tokens(config).loss, torch.cuda.is_available()):
            is_given = {key.partition(".")[0] for key in change} & given.keys()
            is_other = "adapter" in change and config.adapter is None or any(key.endswith(_ROLLOUTS) for key in change)
            if not (is_given or is_other) and needed.of(changed(config, change)).total < estimate.total:
                break
        else:
            break
        config = changed(config, change)
        estimate = needed.of(config)
        for key, value in change.items():
            section, _, name = key.rpartition(".")
            (found.values[section] if section else found.values)[name] = value
            found.comments[key] = f"for the memory of {where}"
    fits = "" if estimate.total <= _ROOM * free else ", which may not be enough: `ebft doctor` says what lowers it"
    found.notes.append(f"Memory: at least {gib(estimate.total)} of {gib(free)} that are free on {where}{fits}")


_WIDTH = 118
_FIRST = ("Model", "Data", "Method", "Adapter")  # groups at the beginning of a file
_PATHS = "# Paths are relative to the folder in which ebft is started. `ebft config` describes all keys."


def written_by(command: Sequence[str]) -> str:
    """The line of a file that says which command wrote it."""
    return f"# Written by `{one_line(shlex.join(command))}`."


def render(draft: Draft, command: Sequence[str]) -> str:
    """The draft as commented YAML, which is checked as `ebft config --check` does. Raises ConfigError."""
    described = {option.key: option.description for options in option_groups().values() for option in options}
    first = {key: text.replace("`", "").partition(". ")[0].rstrip(".") for key, text in described.items()}
    plain = ("base_model", "datasets.N.path", "test_datasets.N.path")  # need no comment
    comments = first | dict.fromkeys(plain, "") | draft.comments
    left, lines = dict(draft.values), [written_by(command), _PATHS, ""]
    for title in (*_FIRST, *(title for title in GROUPS if title not in _FIRST)):
        part = {key: left.pop(key) for key in GROUPS[title].model_fields if key in left}
        if part:
            lines += [f"# {title}", *_mapping(part, comments, ""), ""]
    lines += _mapping(left, comments, "")  # of plugins, if overrides set any
    text = "\n".join(lines).rstrip() + "\n"
    check_runnable(RunConfig.from_dict(parse_yaml(text)), elsewhere=True)
    return text


def write(path: Path, text: str) -> None:
    with doing(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def _mapping(values: dict[str, Any], comments: dict[str, str], indent: str, path: str = "") -> Iterator[str]:
    """The lines of a mapping; `path` is the dotted key of it, with a dot at its end."""
    for key, value in values.items():
        name = f"{path}{key}"
        comment = comments.get(name, "")
        if isinstance(value, dict) and value:
            yield from _commented(f"{indent}{key}:", comment, indent)
            yield from _mapping(value, comments, indent + "  ", name + ".")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            yield from _commented(f"{indent}{key}:", comment, indent)
            for each in value:
                inner = list(_mapping(each, comments, indent + "    ", f"{name}.N."))
                first = next(number for number, line in enumerate(inner) if not line.lstrip().startswith("#"))
                yield from (line[2:] for line in inner[:first])
                yield f"{indent}  - {inner[first].lstrip()}"
                yield from inner[first + 1 :]
        else:
            yield from _commented(f"{indent}{key}: {_scalar(value)}", comment, indent)


def _commented(line: str, comment: str, indent: str) -> Iterator[str]:
    """A line with its comment beside it, or above it if it is long."""
    comment = one_line(comment)  # a line break in it, such as in a path, would end it
    if not comment:
        yield line
    elif len(line) + len(comment) + 3 <= _WIDTH:
        yield f"{line} # {comment}"
    else:
        yield from (f"{indent}# {part}" for part in wrap(comment, _WIDTH - len(indent) - 2))
        yield line


def _scalar(value: Any) -> str:
    """A value as it is written in YAML: plain if it is read as itself."""
    if isinstance(value, float) and value != int(value):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        is_same = "\n" not in plain and parse_yaml(f"key: {plain}") == {"key": value}
    except YAMLError:
        is_same = False
    return plain if is_same else json.dumps(value, ensure_ascii=False)
