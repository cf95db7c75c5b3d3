"""The settings of a new config: from the example of its method, the lengths of its rows, and the free memory."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from ebft.catalog import locate, looks_local
from ebft.config.keys.data import DatasetEntry
from ebft.data.file_formats import files_by_split
from ebft.data.repositories import repository_of
from ebft.data.sources import is_url, read_source, saved_parts, saved_to_disk
from ebft.errors import ConfigError, DataError, ModelError, doing
from ebft.machine import bfloat16_is_fast
from ebft.methods import named_methods
from ebft.methods.method import Method, selected_method
from ebft.models.load import load_model_config
from ebft.models.pretrained import load_tokenizer
from ebft.prefix.attention import HINT
from ebft.prefix.forward import check_supported
from ebft.run.config.combinations import SCHEDULES_WITHOUT_WARMUP
from ebft.run.config.schema import RunConfig, apply_overrides, read_values
from ebft.tools.fetch import examples_folder
from ebft.tools.init.draft import WINDOW, Draft, GivenDataset, fit_to_memory, run_length, windows
from ebft.tools.init.shapes import RAW_TEXT, Shape, shape_of, shape_of_type

_EXAMPLES = {"sft": "sft_chat", "ebft": "strided_prompt_completion", "ebft-structured": "structured_chat"}
_EXAMPLES |= {"grpo": "grpo_verifier"}  # and others have the name of their method
# Keys of an example that depend on its data, model or length of training.
_OF_THE_EXAMPLE = {
    *("base_model", "datasets", "val_set_size", "sequence_len", "sample_packing", "chat_template", "special_tokens"),
    *("micro_batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps", "warmup_steps", "warmup_ratio"),
    *("eval_steps", "eval_on_start", "evals_per_epoch", "save_steps", "saves_per_epoch", "save_total_limit"),
    *("logging_steps", "output_dir", "seed"),
}
_HELD_OUT_SPLITS = ("validation", "test")
_FEWEST = 20  # rows; a tenth is held out
_MOST_HELD_OUT = 128

Choose = Callable[[dict[str, Method], str], str]


def draft(
    data: Sequence[str], model: str, method: str | None, overrides: Sequence[str] = (), choose: Choose | None = None
) -> Draft:
    """The settings for training `model` on `data` (files, folders, Hub ids), with `overrides` (`key=value`).

    `method` is one of `named_methods`; None: what `choose` returns, given the methods that fit and the first one,
    or else that one. Raises DataError for rows of no known shape, ModelError for a model that does not exist, and
    ConfigError for a method that does not fit the rows.
    """
    given: dict[str, Any] = {"datasets": [{} for _ in data]}
    apply_overrides(given, overrides)
    tokenizer, model_config, missing = _model(model)
    template = None if tokenizer is None else tokenizer.chat_template
    sources, shapes, fitting = _read(data, given, template)
    refused = _refused(fitting, model_config)
    note = f"Not {', '.join(refused)}: {next(iter(refused.values()))}" if refused and method is None else None
    method = _method(method, fitting, refused, shapes, choose)
    found = Draft({"base_model": model} | _settings_of(method, given))
    if "adapter" in found.values and not torch.accelerator.is_available() and bfloat16_is_fast():
        found.set("bf16", True, "this processor multiplies faster in bfloat16; the adapter is in float32")
    _add_data(found, method, sources, shapes)
    found.notes += filter(None, (note, missing))
    if any(shape.has_chats for shape in shapes) and tokenizer is not None and template is None:
        if any(shape.has_tools for shape in shapes) and "chat_template" not in given:
            raise ModelError(f"{model} has no chat template for the tools of these chats. Set chat_template=FILE.")
        found.set("chat_template", "chatml", "the tokenizer has no chat template")
        end = "<|im_end|>"
        if end in tokenizer.get_vocab() and tokenizer.eos_token != end:
            found.set("special_tokens", {"eos_token": end}, "the end of a turn, where answers stop")
    _hold_out(found, given, sources)
    is_text = all(shape.is_text for shape in shapes)
    count = windows(sources) if is_text else sum(len(source.rows) for source in sources)
    _schedule(found, given, count)
    found.values["output_dir"] = f"./outputs/{Path(data[0]).stem or 'data'}-{method}"
    apply_overrides(found.values, overrides)
    for key in given.keys() - {"datasets"}:
        found.comments.pop(key, None)
    fit_to_memory(found, given, sources, is_text, tokenizer, model_config)
    found.notes += run_length(found.values, count)
    return found


def _read(
    data: Sequence[str], given: dict[str, Any], template: str | None
) -> tuple[list[GivenDataset], list[Shape], dict[str, Method]]:
    """The datasets, the shapes of their rows, and the methods that train on all rows. Raises DataError."""
    sources, shapes = [], []
    for number, path in enumerate(data):
        entry: dict[str, Any] = {"path": path, **given["datasets"][number]}
        with doing(f"reading datasets.{number} ({path})"):
            parsed = DatasetEntry.model_validate({"type": "completion", **entry})
        rows = read_source(parsed)
        sources.append(GivenDataset(entry, rows, None if "split" in entry else _held_out_split(parsed)))
        given_type = {key: entry[key] for key in entry.keys() & {"type"}}
        shapes.append(shape_of_type(given_type) if given_type else shape_of(rows, entry["path"], template))
    fits = lambda method, shape: method.rows in shape.entries and (shape.has_references or not method.needs_reference)
    methods = {name: method_named(name) for name in named_methods()}
    fitting = {name: method for name, method in methods.items() if all(fits(method, shape) for shape in shapes)}
    if not fitting:
        words = "; ".join(f"{path}: {shape.words}" for path, shape in zip(data, shapes))
        raise DataError(f"No method trains on all of these rows ({words}). Write one config for each kind of rows.")
    return sources, shapes, fitting


def method_named(method: str) -> Method:
    return selected_method(_selection(named_methods()[method]))


def _selection(keys: dict[str, Any]) -> RunConfig:
    """The keys that select a method, as a config that is not checked."""
    config = RunConfig.model_construct(**{key: value for key, value in keys.items() if key != "ebft"})
    ebft = RunConfig.model_fields["ebft"].get_default(call_default_factory=True)
    return config.model_copy(update={"ebft": ebft.model_copy(update=keys.get("ebft", {}))})


def _model(name: str) -> tuple[Any, Any, str | None]:
    """Tokenizer and configuration of a model, or None and a note for one on the Hub only. Raises ModelError."""
    config = RunConfig.from_dict({"base_model": name, "datasets": [{"path": "-", "type": "completion"}]})
    try:
        with warnings.catch_warnings(action="ignore"):
            return load_tokenizer(config), load_model_config(config), None
    except (ModelError, OSError) as error:
        if looks_local(name) or "/" not in name or "there is no such" in str(error) or Path(name).exists():
            raise
        return None, None, f"{name} cannot be read here, so lengths and memory are estimates ({error})"


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


def _refused(fitting: dict[str, Method], model_config: Any) -> dict[str, str]:
    """The methods that do not train models of this architecture, with the reason."""
    names = [name for name, method in fitting.items() if method.samples_blocks]
    if model_config is None or not names:
        return {}
    try:
        with init_empty_weights(include_buffers=True):
            check_supported(AutoModelForCausalLM.from_config(model_config))
    except ModelError as error:
        return dict.fromkeys(names, str(error).removesuffix(f". {HINT}"))
    except (ValueError, RuntimeError, AttributeError):  # such as code of the model's own
        pass
    return {}


def _method(
    wanted: str | None, fitting: dict[str, Method], refused: dict[str, str], shapes: list[Shape], choose: Choose | None
) -> str:
    """The method to use: the one that is wanted, if it can train on all rows and trains the model."""
    fitting = {name: method for name, method in fitting.items() if name not in refused}
    if wanted is None:
        first = next(iter(fitting))
        wanted = first if choose is None or len(fitting) == 1 else choose(fitting, first)
    if wanted not in fitting:
        of_rows = f"it does not train on these rows ({'; '.join(dict.fromkeys(shape.words for shape in shapes))})"
        reason = refused.get(wanted, of_rows)
        raise ConfigError(f"--method {wanted}: {reason}. Methods that fit: {', '.join(fitting)}.")
    return wanted


def _settings_of(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keys of the example of a method that do not depend on its data, with those that select the method."""
    name = _EXAMPLES.get(method, method.replace("-", "_"))
    values = read_values(examples_folder() / f"{name}.yaml")
    found = {key: value for key, value in values.items() if key not in _OF_THE_EXAMPLE}
    if "ebft" in found:
        default = RunConfig.model_fields["ebft"].get_default(call_default_factory=True)
        is_kept = lambda key, value: key == "n_samples_per_prompt" or value != getattr(default, key)
        found["ebft"] = {key: value for key, value in found["ebft"].items() if is_kept(key, value)}
    for key, value in named_methods()[method].items():
        if value is not None:
            found[key] = {**value, **found.get(key, {})} if isinstance(value, dict) else value
    if method in ("grpo", "gdpo"):
        found["trl"] = {key: value for key, value in found["trl"].items() if not key.startswith("reward_")}
    if "adapter" in given and given["adapter"] is None:  # all weights
        found = {key: value for key, value in found.items() if key != "adapter" and not key.startswith("lora_")}
        found |= {"learning_rate": found["learning_rate"] / 10, "torch_dtype": "float32"}
    return found


def _add_data(found: Draft, method: str, sources: list[GivenDataset], shapes: list[Shape]) -> None:
    """The entries of the datasets, as the method reads them, and what they are."""
    pairs = zip(sources, shapes)
    found.notes += [f"{source.entry['path']}: {len(source.rows):,} rows, {shape.words}" for source, shape in pairs]
    found.set("datasets", [], "; ".join(found.notes))
    name = method_named(method).name
    found.notes.append(f"Method: {method} ({name})")
    found.comments |= {"rl": "" if name.startswith("rl: ") else name, "ebft.mode": ""}
    for source, shape in zip(sources, shapes):
        entry = source.entry | shape.entries[method_named(method).rows]
        if method == "sft" and entry["type"] == RAW_TEXT:
            entry["type"] = "completion"
        found.values["datasets"].append(entry)


def _hold_out(found: Draft, given: dict[str, Any], sources: list[GivenDataset]) -> None:
    """Evaluation rows, unless they are given: the split of the data for it, or else a part of the training rows."""
    if "test_datasets" in given or "val_set_size" in given:
        return
    splits = [source.held_out for source in sources]
    if all(splits):
        entries = [entry | {"split": split} for entry, split in zip(found.values["datasets"], splits)]
        found.set("test_datasets", entries, "held-out rows of the same source")
        return
    count = sum(len(source.rows) for source in sources)
    if count < _FEWEST:
        found.notes.append(f"No evaluation: fewer than {_FEWEST} rows ({count}). Add rows, or set test_datasets.")
        found.set("val_set_size", 0, "too few rows to hold some out; test_datasets names others")
        return
    held = min(count // 10, _MOST_HELD_OUT)
    found.notes.append(f"Evaluation: {held} of {count:,} rows are held out")
    found.set("val_set_size", held, f"rows that are held out, of {count:,}")


def _schedule(found: Draft, given: dict[str, Any], count: int) -> None:
    """Epochs, batches, evaluation, checkpoints and logs for this number of rows; batches of few, for enough steps."""
    values = found.values
    found.set("sequence_len", WINDOW)
    if "trl" in values and selected_method(_selection(values)).rows == "prompts":
        size = values["trl"]["num_generations"] * (2 if count >= 100 else 1)
        micro = values["trl"]["num_generations"]
    else:
        size = 16 if count >= 400 else 8 if count >= 100 else 4
        micro = size if torch.cuda.is_available() else 4
    found.set("micro_batch_size", micro)
    words = None if "micro_batch_size" in given else f"{size} rows per optimizer step"
    found.set("gradient_accumulation_steps", size // micro, words)
    found.set("num_epochs", 3)
    if given.get("warmup_steps") is None and given.get("lr_scheduler") not in SCHEDULES_WITHOUT_WARMUP:
        found.set("warmup_ratio", 0.03)
    _evaluate_and_save(found, given, 4 if count // size >= 200 else 1)
    found.set("logging_steps", 1)


_SCHEDULES = (("evals_per_epoch", "saves_per_epoch"), ("eval_steps", "save_steps"), ("eval_strategy", "save_strategy"))


def _evaluate_and_save(found: Draft, given: dict[str, Any], many: int) -> None:
    """Evaluations, checkpoints at them, and the best one of these; `many` times per epoch, if not as given."""
    known = found.values | given
    evaluates = bool(known.get("test_datasets") or known.get("val_set_size")) and known.get("eval_strategy") != "no"
    evaluates = evaluates and known.get("evals_per_epoch") != 0
    saves = known.get("save_strategy") != "no" and known.get("saves_per_epoch") != 0
    chosen = [pair for pair in _SCHEDULES if any(given.get(key) not in (None, 0, "no", "steps") for key in pair)]
    evaluation, save = chosen[0] if chosen else _SCHEDULES[0]
    if evaluates:
        found.set("eval_on_start", True, "so that later evaluations compare with the base model")
        found.set(evaluation, given.get(evaluation) or given.get(save) or many)
    if saves:
        found.set(save, given.get(save) or given.get(evaluation) or many)
    found.set("save_total_limit", 2)
    if not (evaluates and saves and len(chosen) < 2):
        return
    # The best checkpoint is known if each has an evaluation.
    few, many = found.values[evaluation], found.values[save]
    if save == "saves_per_epoch":
        few, many = many, few
    if save == "save_strategy":
        is_evaluated = many in (few, "best")
    else:
        is_evaluated = all(isinstance(value, int | float) for value in (few, many)) and many % few == 0
    if is_evaluated:
        found.set("load_best_model_at_end", True, "keep the checkpoint with the best held-out metric")
