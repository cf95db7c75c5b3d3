"""The settings of a new config: from the example of its method, the lengths of its rows, and the free memory."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from ebft.catalog import locate, looks_local
from ebft.config.load import apply_overrides, read_values
from ebft.config.schema import RunConfig
from ebft.data.file_formats import files_by_split
from ebft.data.keys import DatasetEntry
from ebft.data.repositories import repository_of
from ebft.data.sources import is_url, read_source, saved_parts, saved_to_disk
from ebft.errors import ConfigError, DataError, ModelError, shortened
from ebft.machine import available_memory, gib
from ebft.methods import named_methods
from ebft.methods.method import Method, selected_method
from ebft.models.load import load_model_config
from ebft.models.tokenizer import load_tokenizer
from ebft.tools.doctor.memory import changed, changes, needs
from ebft.tools.doctor.rows import LongestRows, PromptLength, longest_rows, row_lengths
from ebft.tools.fetch import examples_folder
from ebft.tools.init.shapes import RAW_TEXT, Shape, shape_of, shape_of_type

# Where the example of a method has another name than the method.
_EXAMPLES = {
    "sft": "sft_chat",
    "ebft": "paper_lora",
    "ebft-structured": "structured_chat",
    "grpo": "grpo_verifier",
}
# Keys of an example that depend on its data, model or length of training.
_OF_THE_EXAMPLE = {
    *("base_model", "datasets", "val_set_size", "sequence_len", "sample_packing", "chat_template", "special_tokens"),
    *("micro_batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps", "warmup_steps", "warmup_ratio"),
    *("eval_steps", "eval_on_start", "evals_per_epoch", "save_steps", "saves_per_epoch", "save_total_limit"),
    *("logging_steps", "output_dir", "seed"),
}
_HELD_OUT_SPLITS = ("validation", "test")
_SAMPLE = 400  # rows that are measured
_LONGEST = 4096  # tokens of a row, unless it is set
_WINDOW = 1024  # tokens of a window of text
_LONG_TEXT = 20_000  # characters of a row, above which texts are not tokenised for their length
_UNLIMITED = 2**20  # tokens
_CHARACTERS = 3  # of a token, where there is no tokenizer
_FEWEST = 20  # rows, of which a tenth is held out
_MOST_HELD_OUT = 128
_ROOM = 0.7  # of the free memory: activations are estimated roughly

Choose = Callable[[dict[str, Method], str], str]


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
class Source:
    """A dataset that was given: its entry, its rows, and the split of the same source to evaluate on, if any."""

    entry: dict[str, Any]
    rows: Dataset
    held_out: str | None


def draft(
    data: Sequence[str], model: str, method: str | None, overrides: Sequence[str] = (), choose: Choose | None = None
) -> Draft:
    """The settings for training `model` on `data` (files, folders, Hub ids), with `overrides` (`key=value`).

    `method` is one of `named_methods`; None: what `choose` returns, given the methods that fit and the first of them,
    or else that one. Raises DataError for rows of no known shape, ModelError for a model that does not exist, and
    ConfigError for a method that does not fit the rows.
    """
    if method is not None:
        named(method)  # raises
    given: dict[str, Any] = {}
    apply_overrides(given, overrides)
    tokenizer, model_config, missing = _model(model)
    template = None if tokenizer is None else tokenizer.chat_template
    sources = [_source(path, _given_entry(given, number)) for number, path in enumerate(data)]
    shapes = [_shape(source, template) for source in sources]
    method = _method(method, shapes, data, choose)
    found = Draft({"base_model": model} | _settings_of(method, given))
    found.notes += [
        f"{source.entry['path']}: {len(source.rows):,} rows, {shape.words}" for source, shape in zip(sources, shapes)
    ]
    found.notes.append(f"Method: {method} ({named(method).name})")
    found.comments |= {"rl": named(method).name, "ebft.mode": ""}
    if missing:
        found.notes.append(missing)
    found.set("datasets", [], "; ".join(found.notes[: len(sources)]))
    kind = named(method).rows
    for source, shape in zip(sources, shapes):
        entry = source.entry | shape.entries[kind]
        if method == "sft" and entry["type"] == RAW_TEXT:
            entry["type"] = "completion"
        found.values["datasets"].append(entry)
    if any(shape.has_chats for shape in shapes) and tokenizer is not None and template is None:
        if any(shape.has_tools for shape in shapes) and "chat_template" not in given:
            raise ModelError(
                f"{model} has no chat template, and ChatML has no format for the tools of these chats. Use a model "
                "whose template has one, such as an instruct model, or set chat_template to the text of one."
            )
        _add_chat_template(found, tokenizer)
    _hold_out(found, sources)
    _schedule(found, len(data), sum(len(source.rows) for source in sources))
    name = Path(data[0].rstrip("/")).stem or "data"
    found.values["output_dir"] = f"./outputs/{name}-{method}"
    apply_overrides(found.values, overrides)
    is_text = all(shape.is_text for shape in shapes)
    _fit(found, given, sources, is_text, tokenizer, model_config)
    return found


def named(method: str) -> Method:
    """The method of this name. Raises ConfigError for an unknown one."""
    keys = named_methods()
    if method not in keys:
        raise ConfigError(f"--method: unknown method {method!r:.60}; expected one of {', '.join(keys)}.")
    return selected_method(_selection(keys[method]))


def _selection(keys: dict[str, Any]) -> RunConfig:
    """The keys that select a method, as a config that is not checked."""
    config = RunConfig.model_construct(**{key: value for key, value in keys.items() if key != "ebft"})
    ebft = RunConfig.model_fields["ebft"].get_default(call_default_factory=True)
    return config.model_copy(update={"ebft": ebft.model_copy(update=keys.get("ebft", {}))})


def _given_entry(given: dict[str, Any], number: int) -> dict[str, Any]:
    """The keys of entry `number` of `datasets` that overrides set."""
    entries = given.get("datasets")
    found = entries[number] if isinstance(entries, list) and number < len(entries) else None
    return found if isinstance(found, dict) else {}


def _model(name: str) -> tuple[Any, Any, str | None]:
    """The tokenizer and the configuration of a model, or None and a note for one that is on the Hub only.

    Raises ModelError if there is no such model.
    """
    config = RunConfig.from_dict({"base_model": name, "datasets": [{"path": "-", "type": "completion"}]})
    try:
        with warnings.catch_warnings(action="ignore"):
            return load_tokenizer(config), load_model_config(config), None
    except ModelError as error:
        if looks_local(name) or "/" not in name or "there is no such" in str(error) or Path(name).exists():
            raise
        return None, None, f"{name} cannot be read here, so lengths and memory are estimates ({error})"


def _source(path: str, given: dict[str, Any]) -> Source:
    """Read the training split of a dataset, and find the split to evaluate on."""
    entry: dict[str, Any] = {"path": path, **given}
    parsed = DatasetEntry.model_validate({"type": "completion", **entry})
    return Source(entry, read_source(parsed), None if "split" in given else _held_out_split(parsed))


def _held_out_split(entry: DatasetEntry) -> str | None:
    """The split of a folder whose rows are for evaluation."""
    path = None if is_url(entry.path) else locate(entry.path, "dataset", "datasets.path")
    if path is None or not path.is_dir() or entry.data_files:
        return None
    if saved_to_disk(path):
        splits = list(saved_parts(path))
    else:
        found = repository_of(path, entry)
        splits = list(files_by_split(path, entry.ds_type, entry.path) if found is None else found.files)
    return next((split for split in _HELD_OUT_SPLITS if split in splits and split != entry.split), None)


def _shape(source: Source, template: str | None) -> Shape:
    if "type" in source.entry:
        return shape_of_type({"type": source.entry["type"]})
    return shape_of(source.rows, source.entry["path"], template)


def _method(wanted: str | None, shapes: list[Shape], data: Sequence[str], choose: Choose | None) -> str:
    """The method to use: the one that is wanted, if it can train on all rows."""
    fitting = {name: named(name) for name in named_methods() if all(_fits(named(name), shape) for shape in shapes)}
    if not fitting:
        words = "; ".join(f"{path}: {shape.words}" for path, shape in zip(data, shapes))
        raise DataError(f"No method trains on all of these rows ({words}). Write one config for each kind of rows.")
    if wanted is None:
        first = next(iter(fitting))
        wanted = first if choose is None or len(fitting) == 1 else choose(fitting, first)
    if named(wanted) not in fitting.values():
        words = "; ".join(dict.fromkeys(shape.words for shape in shapes))
        raise ConfigError(
            f"--method {wanted} does not train on these rows ({words}). Methods that do: {', '.join(fitting)}."
        )
    return wanted


def _fits(method: Method, shape: Shape) -> bool:
    return method.rows in shape.entries and (shape.has_references or not method.needs_reference)


def _settings_of(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keys of the example of a method that do not depend on its data, with those that select the method."""
    name = _EXAMPLES.get(method, method.replace("-", "_"))
    values = read_values(examples_folder() / f"{name}.yaml")
    found = {key: value for key, value in values.items() if key not in _OF_THE_EXAMPLE}
    for section in ("ebft", "trl"):
        if section in found:
            found[section] = _without_defaults(section, found[section])
    for key, value in named_methods()[method].items():
        if value is not None:
            found[key] = {**value, **found.get(key, {})} if isinstance(value, dict) else value
    if method in ("grpo", "gdpo"):
        found["trl"] = {key: value for key, value in found["trl"].items() if not key.startswith("reward_")}
        if "reward_funcs" not in (given.get("trl") or {}):
            raise ConfigError(
                f"--method {method} needs a function that scores completions: add "
                "'trl.reward_funcs=[module.function]', the name of your function in a file module.py."
            )
    if "adapter" in given and given["adapter"] is None:  # all weights
        found = {key: value for key, value in found.items() if key != "adapter" and not key.startswith("lora_")}
        found |= {"learning_rate": found["learning_rate"] / 10, "torch_dtype": "float32"}
    return found


def _without_defaults(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a section that are not those of its keys; the numbers of completions are always written."""
    default = RunConfig.model_fields[section].get_default(call_default_factory=True)
    return {key: value for key, value in values.items() if section == "trl" or value != getattr(default, key)}


def _add_chat_template(found: Draft, tokenizer: Any) -> None:
    """Render chats with ChatML if the model has no template."""
    found.set("chat_template", "chatml", "the tokenizer has no chat template")
    end = "<|im_end|>"
    if end in tokenizer.get_vocab() and tokenizer.eos_token != end:
        found.set("special_tokens", {"eos_token": end}, "the end of a turn, where answers stop")


def _hold_out(found: Draft, sources: list[Source]) -> None:
    """Evaluation rows: the split of the data for it, or else a part of the training rows."""
    splits = [source.held_out for source in sources]
    if all(splits):
        entries = [entry | {"split": split} for entry, split in zip(found.values["datasets"], splits)]
        found.set("test_datasets", entries, "held-out rows of the same source")
        return
    count = sum(len(source.rows) for source in sources)
    if count < _FEWEST:
        found.notes.append(
            f"No evaluation: {count} row{'s' * (count != 1)} of data, and at least {_FEWEST} are needed to hold some "
            "out. Add rows, or set test_datasets."
        )
        found.set("val_set_size", 0, "too few rows to hold some out; test_datasets names others")
        return
    held = min(count // 10, _MOST_HELD_OUT)
    found.notes.append(f"Evaluation: {held} of {count:,} rows are held out")
    found.set("val_set_size", held, f"rows that are held out, of {count:,}")


def _schedule(found: Draft, sources: int, count: int) -> None:
    """Epochs, batches, evaluation, checkpoints and logs; batches of few rows, so that there are enough steps."""
    values = found.values
    found.set("sequence_len", _WINDOW)
    if "trl" in values and selected_method(_selection(values)).rows == "prompts":
        size = values["trl"]["num_generations"] * (2 if count >= 100 else 1)
        micro = values["trl"]["num_generations"]
    else:
        size = 16 if count >= 400 else 8 if count >= 100 else 4
        micro = size if torch.cuda.is_available() else 4
    found.set("micro_batch_size", micro)
    found.set("gradient_accumulation_steps", size // micro, f"{size} rows per optimizer step")
    found.set("num_epochs", 3)
    found.set("warmup_ratio", 0.03)
    many = 4 if count // size >= 200 else 1
    evaluates = found.values.get("val_set_size") != 0
    if evaluates:
        found.set("eval_on_start", True, "so that later evaluations compare with the base model")
        found.set("evals_per_epoch", many)
    found.set("saves_per_epoch", many)
    found.set("save_total_limit", 2)
    if evaluates:
        found.set("load_best_model_at_end", True, "keep the checkpoint with the best held-out metric")
    found.set("logging_steps", 1)


def _fit(
    found: Draft, given: dict[str, Any], sources: list[Source], is_text: bool, tokenizer: Any, model_config: Any
) -> None:
    """Set the length of rows, and what fits the memory, unless they are given. Raises ConfigError for wrong values."""
    config = RunConfig.from_dict(copy.deepcopy(found.values))
    longest = None if model_config is None else getattr(model_config.get_text_config(), "max_position_embeddings", None)
    limit = min(_LONGEST, longest or _LONGEST)
    if is_text or tokenizer is None:
        rows, lengths = None, _characters(sources, None if is_text else config)
    else:
        rows, lengths = _sampled(found.values, sources)
    if "sequence_len" not in given:
        _set_length(found, [_total(each) for each in lengths], min(limit, _WINDOW) if is_text else limit, is_text)
    if rows is not None and isinstance(lengths[0], PromptLength):
        _set_completion(found, given, lengths)
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


def _total(length: int | PromptLength) -> int:
    return length.prompt + length.reference if isinstance(length, PromptLength) else length


def _characters(sources: list[Source], config: RunConfig | None) -> list[int]:
    """The lengths of rows, estimated from their characters; of texts if `config` is None."""
    found = []
    for source in sources:
        step = max(1, len(source.rows) // _SAMPLE)
        found += [_count(row) // _CHARACTERS for row in source.rows.select(range(0, len(source.rows), step))]
    return found


def _count(value: Any) -> int:
    """The characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_count, parts))


def _sampled(values: dict[str, Any], sources: list[Source]) -> tuple[Dataset, list[int] | list[PromptLength]]:
    """Rows of a sample of the data as the method reads them, and their lengths. Raises DataError for unusable rows."""
    values = copy.deepcopy(values) | {"sequence_len": _UNLIMITED, "val_set_size": 0, "test_datasets": []}
    for key in ("eval_on_start", "evals_per_epoch", "load_best_model_at_end"):
        values.pop(key, None)
    for entry, source in zip(values["datasets"], sources):
        if "shards" not in entry:
            entry["shards"] = max(1, len(source.rows) // _SAMPLE)
    config = RunConfig.from_dict(values)
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        tokenizer = load_tokenizer(config)  # with the chat template and special tokens of the config
        rows = config.method.load_rows(config, tokenizer).train
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


def _set_completion(found: Draft, given: dict[str, Any], lengths: Sequence[Any]) -> None:
    """The longest completion to sample: that of 95 of 100 references."""
    if "max_completion_length" in (given.get("trl") or {}):
        return
    ordered = sorted(max(reference for _, reference in each.turns) for each in lengths)
    usual = ordered[math.ceil(0.95 * len(ordered)) - 1]
    default = found.values["trl"]["max_completion_length"]
    length = min(default, max(32, math.ceil(usual / 32) * 32)) if usual else default
    found.values["trl"]["max_completion_length"] = length
    found.comments["trl.max_completion_length"] = f"95% of the references have at most {usual} tokens"


def _fit_memory(found: Draft, given: dict[str, Any], config: RunConfig, model_config: Any, rows: LongestRows) -> None:
    """Change what lowers the memory of a step until it fits, first what leaves the step the same."""
    try:
        needed = needs(config, model_config, rows)
        estimate = needed.of(config)
    except (ValueError, RuntimeError, AttributeError) as error:
        found.notes.append(f"Memory: cannot be estimated for this model ({shortened(str(error))})")
        return
    free, where = available_memory(estimate.placed_on)
    if free is None:
        return
    while estimate.total > _ROOM * free:
        change = next(_lowering(needed, config, given), None)
        if change is None:
            break
        config = changed(config, change)
        estimate = needed.of(config)
        for key, value in change.items():
            section, _, name = key.rpartition(".")
            (found.values[section] if section else found.values)[name] = value
            found.comments[key] = f"for the memory of {where}"
    fits = "" if estimate.total <= _ROOM * free else ", which may not be enough: `ebft doctor` says what lowers it"
    found.notes.append(f"Memory: about {gib(estimate.total)} of {gib(free)} that are free on {where}{fits}")


def _lowering(needed: Any, config: RunConfig, given: dict[str, Any]) -> Any:
    """Changes of keys that are not given and that lower the memory of a step, without what changes the rollouts."""
    tokens = needed.rows.step_tokens(config).loss
    now = needed.of(config).total
    for _, change in changes(config, tokens, torch.cuda.is_available()):
        sections = {key.partition(".")[0] for key in change}
        samples = any(
            key.endswith(("n_samples_per_prompt", "generate_max_len", "max_completion_length")) for key in change
        )
        if sections & given.keys() or samples or "adapter" in change and config.adapter is None:
            continue
        if needed.of(changed(config, change)).total < now:
            yield change
