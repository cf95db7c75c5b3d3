"""Transforms turn a raw row into tokens; the `type` of a dataset entry names one.

A transform is a function `transform(cfg, **kwargs)` that returns `(transform_fn, map_kwargs)`:
`transform_fn(example, tokenizer=None)` gives the fields `input_ids`, `labels` and optionally `prompt_length` and
`attention_mask`; `map_kwargs` go to `datasets.Dataset.map`, with `{"remove_columns": "__all__"}` for all original
columns. To add a built-in one, put a module with such a function in this folder and its name in
`ebft.config.data.BUILT_IN_TRANSFORMS`.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Callable

from ebft.config.data import BUILT_IN_TRANSFORMS as BUILT_IN
from ebft.errors import DataError

# Transforms of the guide's structured mode, whose rows hold prompts as text and no tokens to train on.
_STRUCTURED_MODE = ("ebft_opencode", "ebft_chat_multiturn", "ebft_reasoning")
STRUCTURED_HINT = (
    "structured mode, which this version does not train. In strided mode use ebft_strided_structured.transform for "
    "rows of input and output, and ebft_strided_chat.transform for chats."
)


def find_transform(name: str) -> Callable:
    """The function that a dataset `type` means: a built-in transform, or `module.function` of the user's own.

    Modules are looked up as Python does, and in the working directory. Raises DataError for an unknown name.
    """
    module, _, function = name.rpartition(".")
    if (module or name) in BUILT_IN:
        return _attribute(importlib.import_module(f"{__name__}.{module or name}"), function if module else "", name)
    if (module or name) in _STRUCTURED_MODE:
        raise DataError(f"datasets.type: {name!r} belongs to {STRUCTURED_HINT}")
    if not module:
        raise DataError(f"datasets.type: there is no transform {name!r}.{_hint(name)}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, but something that it imports is not
        raise DataError(
            f"datasets.type: {name!r} means function {function!r} of module {module!r}, and there is no such "
            f"module here (looked in {os.getcwd()} and the installed packages).{_hint(module)}"
        ) from error
    return _attribute(found, function, name)


def _attribute(module: object, function: str, name: str) -> Callable:
    found = vars(module).get(function or "transform")
    if not callable(found):
        raise DataError(f"datasets.type: {name!r}: module {module.__name__} has no function {function!r}.")
    return found


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"{guess} Built in are {', '.join(BUILT_IN)}; your own is written module.function."
