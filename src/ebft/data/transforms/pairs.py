"""Columns of prompt and completion: their supported names, and reading the two texts of a row."""

from typing import Any

from ebft.data.transforms.rows import text_of
from ebft.errors import DataError

PAIRS = (
    ("input", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("prompt", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("problem", "solution"),
)


def prompt_and_completion(example: dict[str, Any]) -> tuple[str, str]:
    """The two texts of the first of `PAIRS` that the row has. Raises DataError if it has none of them.

    With `input` and `output`, an `instruction` is put before the input, separated by an empty line.
    """
    for prompt_column, completion_column in PAIRS:
        if prompt_column in example and completion_column in example:
            prompt = text_of(example, prompt_column)
            if prompt_column == "input" and "instruction" in example:
                prompt = "\n\n".join(part for part in (text_of(example, "instruction"), prompt) if part)
            return prompt, text_of(example, completion_column)
    known = ", ".join(f"{prompt}/{completion}" for prompt, completion in PAIRS)
    raise DataError(
        f"no prompt and completion columns: supported pairs are {known}, but the row has {', '.join(example)}. "
        "Rename the columns, or write a custom transform."
    )
