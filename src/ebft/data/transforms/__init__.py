"""Transforms convert raw rows to rows for training; the `type` of a dataset entry names one.

A transform is a function `transform(cfg, **kwargs)` that returns `(transform_fn, map_kwargs)`:
`transform_fn(example, tokenizer=None)` returns the fields `input_ids`, `labels` and optionally `prompt_length`,
`turn_spans` and `attention_mask`, or, for structured mode and `rl: grpo`, `prompt` and `ground_truth`; `map_kwargs` are
passed to `datasets.Dataset.map`, where `{"remove_columns": "__all__"}` removes all original columns. To add a built-in
transform, add a function to a file of this folder and its name to `ebft.data.keys.BUILT_IN_TRANSFORMS`: the `type`
`name.transform_kind` is the function `name_kind`.
"""

import importlib
from collections.abc import Callable

from ebft.data.transforms.names import Type, built_in, is_format, own_transform

_FILES = ("text", "chats", "reward")


def find_transform(name: Type) -> Callable:
    """The function for a dataset `type`: a built-in transform, or a custom `module.function`.

    Raises DataError for an unknown name.
    """
    found = built_in(name)
    if found is None:
        return own_transform(name)
    if is_format(name):
        return importlib.import_module("ebft.data.preferences").format_transform(name)
    function = "_".join(found).replace("_transform", "", 1)
    modules = (importlib.import_module(f"{__name__}.{file}") for file in _FILES)
    return next(vars(module)[function] for module in modules if function in vars(module))
