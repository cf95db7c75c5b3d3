"""The files of models and adapters: checks of their values, and hashes by which a resumed run notices changes.

transformers reports wrong values in config.json without the file or the key. The index of weights that FSDP2 saved in
parts is read without running code. Hashes of weights do not depend on the folder or on how weights are divided into
files; of large weights, a sample is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ebft.catalog import lasting_name
from ebft.errors import ModelError, cause
from ebft.files import ADAPTER_CONFIG, exists, is_pointer, json_object

SCORE, STEPS = "ForSequenceClassification", "ForTokenClassification"  # endings of class names
TASKS = {"ForCausalLM": "CAUSAL_LM", SCORE: "SEQ_CLS", STEPS: "TOKEN_CLS"}  # of adapters, by class names
_HINT = "Give the folder or Hub id of a reward model with one score per text, such as one of reward_model: true."


def _classifier_kind(folder: Path) -> str | None:
    """SCORE or STEPS for a folder with such a model or an adapter of one; None for other folders."""
    task, kind = _values(folder / ADAPTER_CONFIG).get("task_type"), _kind_of(_values(folder / "config.json"))
    return next((end for end in (SCORE, STEPS) if end == kind or task == TASKS[end]), None)


def _kind_of(config: dict[str, Any]) -> str | None:
    names = [str(name) for name in config.get("architectures") or []]
    return next((end for end in (SCORE, STEPS) if any(name.endswith(end) for name in names)), None)


def refuse_classifier(folder: Path, use: str = "it cannot generate text") -> None:
    """Raise ModelError, with the reason `use`, if a folder has a reward model or an adapter of one."""
    kind = _classifier_kind(folder)
    if kind is not None:
        hint = " It can be used in trl.reward_funcs of rl: grpo" if kind == SCORE else ""
        flag = "reward_model" if kind == SCORE else "process_reward_model"
        raise ModelError(f"{folder} is a model of {flag}: true, so {use}.{hint}")


def reward_problem(name: str, values: dict[str, Any] | None = None) -> str | None:
    """Why a model cannot give rewards, as a message: that of a folder, or with the `values` of config.json.

    None if it can, and for what is not a folder.
    """
    folder = Path(name).expanduser()
    if values is None and not exists(folder):
        return None
    if values is None and exists(folder / ADAPTER_CONFIG):
        kind, labels = _classifier_kind(folder), 1
    else:
        values = _values(folder / "config.json") if values is None else values
        kind = _kind_of(values)
        labels = len(values.get("id2label") or (0, 1))  # transformers leaves out its default of two
    if kind != SCORE:
        found = "classifies the tokens of steps" if kind == STEPS else "is not a sequence classifier"
        return f"trl.reward_funcs: {name} cannot give rewards, because it {found}. {_HINT}"
    if labels != 1:
        return f"trl.reward_funcs: {name} cannot give rewards, because it has {labels} outputs per text. {_HINT}"
    return None


def _values(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it cannot be read, which is reported where it is needed."""
    try:
        return json_object(path)
    except (OSError, ValueError):
        return {}


def refuse_pointers(folder: Path) -> None:
    """Raise ModelError for a folder with a file that Git LFS has not downloaded."""
    found = next((path for path in sorted(folder.glob("*")) if is_pointer(path)), None)
    if found is not None:
        raise ModelError(
            f"{found} is a pointer of Git LFS to a file that is not on this machine. Run `git lfs pull` in its folder."
        )


def read_object(path: Path, hint: str, key: str = "") -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError with a `hint` if it cannot be read; `key` is the config key."""
    try:
        return json_object(path)
    except (OSError, ValueError) as error:
        name = f"{key}: {path}" if key else path
        raise ModelError(f"{name} cannot be read as JSON ({cause(error)}). {hint}") from error


# Sizes with their least values. Models without layers are refused when they are loaded.
_SIZES = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "max_position_embeddings": 1,
    "num_key_value_heads": 1,
}
_DROPOUT = re.compile(r"(.*_)?(dropout|pdrop|layerdrop)(_rate|_prob|_p)?")  # keys with a probability
_QUANTISATIONS = {"quant_method", "load_in_4bit", "load_in_8bit"}
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "partial_rotary_factor", "attention_factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
_DIVISORS = ("rope_theta", "factor")  # which are not 0


def refuse_values(place: str, wrong: Iterable[tuple[str, Any, str]]) -> None:
    """Raise ModelError for the first of the `wrong` values, each with its name and what is expected."""
    for name, value, expected in wrong:
        raise ModelError(f"{place}: {name}: invalid value {value!r:.60}; expected {expected}.")


def wrong_values(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Sizes, dtypes and rates in a config.json that no model has, with their names and what is expected.

    Some models have one size per layer, and models of several parts have their sizes in sections; both are left to
    transformers.
    """
    for name, least in _SIZES.items():
        value = values.get(name, least)
        is_default = value is None and ("text_config" in values or name == "num_key_value_heads")
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not (is_size or is_default or isinstance(value, list)):
            yield name, value, f"an integer of at least {least}"
    for name in ("dtype", "torch_dtype"):
        value = values.get(name)
        if isinstance(value, str) and value != "auto" and not _is_dtype(value, values):
            yield name, value, "a dtype such as bfloat16"
    for section in (values, values.get("text_config")):
        if isinstance(section, Mapping):
            yield from _wrong_rope(section)
            for name, value in section.items():
                is_rate = _DROPOUT.fullmatch(name) and isinstance(value, int | float) and value is not True
                if is_rate and not 0 <= value < 1:
                    yield name, value, "a number from 0 to less than 1"
    quantised = values.get("quantization_config", {"quant_method": ""})
    if quantised is not None and not (isinstance(quantised, dict) and quantised.keys() & _QUANTISATIONS):
        expected = "an object with a quant_method. Remove it if the weights are not quantised"
        yield "quantization_config", quantised, expected


def key_with(value: Any, values: Mapping[str, Any]) -> str | None:
    """The key, with those of its sections, that has a value in the content of a config.json; None if none has."""
    for name, found in values.items():
        if isinstance(found, Mapping):
            inner = key_with(value, found)
            if inner is not None:
                return f"{name}.{inner}"
        elif found == value:
            return name
    return None


def _wrong_rope(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Numbers of the rotary embedding that are a text, negative, or 0 where it divides.

    Some models have one set of them per kind of layer, and some a list with one number per layer.
    """
    sections = [("", {"rope_theta": values.get("rope_theta")})]
    sections += [(f"{name}.", values.get(name)) for name in ("rope_parameters", "rope_scaling")]
    for prefix, section in sections:
        for name, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, dict):
                sections.append((f"{prefix}{name}.", value))
            elif name in _ROPE_NUMBERS and (isinstance(value, str) or _is_negative(value, name in _DIVISORS)):
                yield f"{prefix}{name}", value, "a positive number"


def _is_negative(value: Any, or_zero: bool) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (not value >= 0 or (or_zero and value == 0))  # true for NaN


def _is_dtype(name: str, values: Mapping[str, Any]) -> bool:
    import torch

    found = getattr(torch, name.removeprefix("torch."), None)
    return isinstance(found, torch.dtype) and (found.is_floating_point or "quantization_config" in values)


_HEADS = ("lm_head", "embed_out")  # names of output layers in transformers
_KINDS = {
    "CAUSAL_LM": "a language model",
    "SEQ_CLS": "a reward model (reward_model: true)",
    "TOKEN_CLS": "a process reward model (process_reward_model: true)",
}


def _adapter_settings(name: str) -> dict[str, Any]:
    return _values(Path(lasting_name(name)).expanduser() / ADAPTER_CONFIG)


def task_problem(name: str, class_ending: str) -> str | None:
    """Why an adapter does not fit a model of the class, as a message; None if it does, or has no settings."""
    settings, wanted = _adapter_settings(name), TASKS[class_ending]
    found = settings.get("task_type")
    if not settings or found == wanted or (found is None and class_ending == "ForCausalLM"):
        return None
    of = _KINDS.get(found, f"another kind of model (task_type: {found!r:.60})") if isinstance(found, str) else "no task"
    merge = " Or merge it into its base model (ebft merge-lora), and set base_model to the result."
    return (
        f"lora_model_dir: {name} is an adapter of {of}, but this run trains {_KINDS[wanted]}, which has another output "
        f"layer. Remove lora_model_dir to train a new adapter.{merge if found == 'CAUSAL_LM' else ''}"
    )


def adapted_heads(targets: Any) -> list[str]:
    """The output layers that PEFT's `target_modules` select: a regular expression, or suffixes of names."""
    if not isinstance(targets, str):
        return [name for name in _HEADS if isinstance(targets, list) and name in targets]
    try:
        return [name for name in _HEADS if re.fullmatch(targets, name)]
    except re.error:  # reported when the adapter is created
        return []


def adapted_head(name: str) -> str | None:
    """The output layer that a saved adapter adapts; None if it does not, or replaces it by a trained copy."""
    settings = _adapter_settings(name)
    excluded = set(adapted_heads(settings.get("exclude_modules")))
    return next((head for head in adapted_heads(settings.get("target_modules")) if head not in excluded), None)
