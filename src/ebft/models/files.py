"""The kinds of models and adapters, by their files, before they are loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ebft.catalog import lasting_name
from ebft.errors import ModelError
from ebft.files import ADAPTER_CONFIG, exists, is_pointer, json_object

SCORE, STEPS = "ForSequenceClassification", "ForTokenClassification"  # endings of class names
TASKS = {"ForCausalLM": "CAUSAL_LM", SCORE: "SEQ_CLS", STEPS: "TOKEN_CLS"}  # of adapters, by class names


def _classifier_kind(folder: Path, config: dict[str, Any] | None = None) -> str | None:
    """SCORE or STEPS for a folder with such a model or an adapter of one, or for the content of its config.json."""
    task = None if config is not None else _values(folder / ADAPTER_CONFIG).get("task_type")
    names = (_values(folder / "config.json") if config is None else config).get("architectures") or []
    return next((end for end in (SCORE, STEPS) if task == TASKS[end] or any(str(n).endswith(end) for n in names)), None)


def refuse_classifier(folder: Path, use: str = "it cannot generate text") -> None:
    """Raise ModelError, with the reason `use`, if a folder has a reward model or an adapter of one."""
    kind = _classifier_kind(folder)
    if kind is not None:
        hint = " It can be used in trl.reward_funcs of rl: grpo" if kind == SCORE else ""
        flag = "reward_model" if kind == SCORE else "process_reward_model"
        raise ModelError(f"{folder} is a model of {flag}: true, so {use}.{hint}")


def reward_problem(name: str, values: dict[str, Any] | None = None) -> str | None:
    """Why the model in a folder, or with the `values` of config.json, cannot give rewards, as a message. None if it
    can, and for what is not a folder."""
    folder = Path(name).expanduser()
    if values is None and not exists(folder):
        return None
    if values is None and not exists(folder / ADAPTER_CONFIG):
        values = _values(folder / "config.json")
    # transformers leaves out its default of two labels
    if _classifier_kind(folder, values) == SCORE and (values is None or len(values.get("id2label") or (0, 1)) == 1):
        return None
    return (
        f"trl.reward_funcs: {name} cannot give rewards, because it is not a classifier with one output per text. Give "
        "the folder or Hub id of a reward model, such as one of reward_model: true."
    )


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
        raise ModelError(f"{found} is a pointer of Git LFS. Run `git lfs pull` in its folder.")


_HEADS = ("lm_head", "embed_out")  # names of output layers in transformers


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
    settings = _values(Path(lasting_name(name)).expanduser() / ADAPTER_CONFIG)
    excluded = set(adapted_heads(settings.get("exclude_modules")))
    return next((head for head in adapted_heads(settings.get("target_modules")) if head not in excluded), None)
