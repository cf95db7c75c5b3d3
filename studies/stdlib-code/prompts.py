"""Rows {input, output} as plain text for structured mode: a base model has no chat template."""

from typing import Any


def transform(cfg: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Transform for rows whose prompt goes on as it is."""

    def transform_fn(example: dict[str, Any], tokenizer: Any = None) -> dict[str, str]:
        return {"prompt": example["input"], "ground_truth": example["output"]}

    return transform_fn, {"remove_columns": "__all__"}
