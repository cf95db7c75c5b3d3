"""The `type` of a dataset: a built-in transform, looked up in a table without imports, or a custom function.

A bare `module` is short for `module.transform` if the module is built in.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder

from ebft.config.user_code import find_function, no_function
from ebft.data.keys import (
    BUILT_IN_TRANSFORMS,
    EQUIVALENT_TRANSFORMS,
    PREFERENCE_FORMATS,
    USER_DEFINED,
    PreferenceColumns,
    RequiredRows,
    Rows,
)
from ebft.errors import DataError

_KEY = "datasets.type"
# Prompt strategies of axolotl that describe the columns of one data set, and the keys that describe any columns.
_STRATEGIES = {
    *(
        "alpaca_instruct",
        "alpaca_w_system",
        "concisechoice",
        "context_qa",
        "creative_acr",
        "explainchoice",
        "gpteacher",
    ),
    *("instruct_w_system", "jeopardy", "llama2_chat", "metharme", "oasst", "orcamini", "pygmalion"),
    *("reflection", "sharegpt", "sharegpt_jokes", "simple_shareGPT", "summarizetldr"),
}
_FIELDS = {
    "tokens": "input_ids and labels",
    "prompts": "prompt and ground_truth",
    "comparisons": "chosen_ids and rejected_ids",
    "steps": "input_ids and labels of steps",
    "preferences": "prompt, chosen and rejected",
    "labelled": "prompt, completion and label",
}
_REFUSED = {
    "zephyr.nectar": "it samples pairs from a ranking, with other pairs in each run. Convert the rows to prompt, "
    "chosen and rejected once, and use passthrough",
    "user_defined.default": "write the columns as a mapping, type: {field_prompt: ..., field_chosen: ..., "
    "field_rejected: ...}",
    "orpo.chat_template": "use chat_template.argilla, for chats in the columns chosen and rejected that differ in "
    "their last message",
    "pretrain": "use completion, with field for the column of the text",
}
Type = str | PreferenceColumns  # the `type` of a dataset


def built_in(name: Type) -> tuple[str, str] | None:
    """Module and function of a built-in transform, None for others. Raises DataError if the function does not exist."""
    name = USER_DEFINED if isinstance(name, PreferenceColumns) else name
    module, _, function = name.rpartition(".")
    if not module:
        module, function = name, "transform"
    if name in PREFERENCE_FORMATS:
        return module, function
    if name in _REFUSED and not _is_module(name.partition(".")[0]):
        raise DataError(f"{_KEY}: {name!r} is not supported: {_REFUSED[name]}.")
    formats = [each.rpartition(".")[2] for each in PREFERENCE_FORMATS if each.startswith(f"{module}.")]
    functions = [*BUILT_IN_TRANSFORMS.get(module, ()), *formats]
    if not functions:
        return None
    if function not in BUILT_IN_TRANSFORMS.get(module, ()):
        raise no_function(_KEY, name, module, function, functions, DataError)
    return module, function


def own_transform(name: str) -> Callable:
    """The custom function `module.function`; modules are looked up on Python's path and in the working directory.

    Raises DataError if it does not exist.
    """
    strategy = re.split(r"[.:]", name)[0]
    if strategy in _STRATEGIES and not _is_module(strategy):
        raise DataError(
            f"{_KEY}: {name!r} is a prompt strategy of axolotl that is not built in. Name the columns and the text of "
            "the prompt with a mapping, type: {field_instruction: ..., field_output: ..., format: ...}, or use one of "
            f"{', '.join(BUILT_IN_TRANSFORMS)}, or a custom transform module.function."
        )
    return find_function(_KEY, name, DataError, _hint(name.rpartition(".")[0] or name))


def is_format(name: Type) -> bool:
    """Whether a `type` is one of the formats of preference data."""
    return isinstance(name, PreferenceColumns) or name in PREFERENCE_FORMATS


def rows_of(name: Type) -> tuple[Rows, ...]:
    """The kinds of rows that a built-in transform can return; empty for custom functions."""
    found = built_in(name)
    if found is None:
        return ()
    name = USER_DEFINED if isinstance(name, PreferenceColumns) else name
    return PREFERENCE_FORMATS.get(name) or (BUILT_IN_TRANSFORMS[found[0]][found[1]],)


def check_transform(name: Type, rows: RequiredRows) -> None:
    """Raise DataError if `type` is not a transform, or a built-in one that returns other rows."""
    given = rows_of(name)
    if not given:
        own_transform(name)
    elif rows.kind not in given:
        fields = " or ".join(_FIELDS[kind] for kind in given)
        name = "the mapping of columns" if isinstance(name, PreferenceColumns) else repr(name)
        raise DataError(f"datasets.type: {name} returns rows of {fields}, but {wanted_rows(rows)}")


def equivalent_transform(name: Type, kind: Rows) -> str | None:
    """The built-in transform that replaces `name` to get rows of `kind`; None if none is needed or available."""
    if kind not in ("tokens", "prompts") or not isinstance(name, str):
        return None
    full = name if "." in name else f"{name}.transform"
    module, _, function = full.rpartition(".")
    given = BUILT_IN_TRANSFORMS.get(module, {}).get(function)
    return None if given in (None, kind) else EQUIVALENT_TRANSFORMS.get(full)


def reads_lines(name: Type) -> bool:
    """Whether a transform receives the lines of a file (column `line`), since a table would change their values."""
    return built_in(name) == ("nemo_gym", "transform")


def wanted_rows(rows: RequiredRows) -> str:
    """The rows that a run trains on and the transforms that return them, worded to follow "but "."""
    fitting = [
        f"{module}.{function}"
        for module, functions in BUILT_IN_TRANSFORMS.items()
        for function, given in functions.items()
        if given == rows.kind
    ]
    fitting += [name for name, kinds in PREFERENCE_FORMATS.items() if rows.kind in kinds and name != USER_DEFINED]
    if rows.kind in ("preferences", "labelled"):
        fitting.append("a mapping of columns ({field_prompt: ...})")
    return (
        f"{trains_on(rows)}. Use {', '.join(fitting)}, or a custom transform "
        "that returns them, or change the method (rl, ebft.mode, reward_model)."
    )


def trains_on(rows: RequiredRows) -> str:
    """The rows that a run trains on, for messages."""
    return f"{rows.method} trains on rows of {_FIELDS[rows.kind]}"


def _is_module(name: str) -> bool:
    """Whether there is a module of this name, also in the working directory."""
    return PathFinder.find_spec(name, [*sys.path, os.getcwd()]) is not None


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, BUILT_IN_TRANSFORMS, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"{guess} Built-in transforms: {', '.join(BUILT_IN_TRANSFORMS)}."
