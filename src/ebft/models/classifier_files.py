"""Which kind of reward model the files of a folder contain, read without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebft.errors import ModelError
from ebft.paths import exists, json_object

SCORE, STEPS = "ForSequenceClassification", "ForTokenClassification"  # endings of class names
_TASKS = {SCORE: "SEQ_CLS", STEPS: "TOKEN_CLS"}  # of adapters
_HINT = "Give the folder or Hub id of a reward model with one score per text, such as one of reward_model: true."


def classifier_kind(folder: Path) -> str | None:
    """SCORE or STEPS for a folder with such a model or an adapter of one; None for other folders."""
    names = _values(folder / "config.json").get("architectures") or []
    task = _values(folder / "adapter_config.json").get("task_type")
    return next((end for end in _TASKS if task == _TASKS[end] or any(str(name).endswith(end) for name in names)), None)


def refuse_classifier(folder: Path, use: str = "it cannot generate text") -> None:
    """Raise ModelError, with the reason `use`, if a folder has a reward model or an adapter of one."""
    kind = classifier_kind(folder)
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
    if values is None and exists(folder / "adapter_config.json"):
        kind, labels = classifier_kind(folder), 1
    else:
        values = _values(folder / "config.json") if values is None else values
        names = values.get("architectures") or []
        kind = next((end for end in _TASKS if any(str(found).endswith(end) for found in names)), None)
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
