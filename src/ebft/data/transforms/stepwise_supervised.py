"""Steps for process reward models: `{prompt, completions, labels}` -> `{input_ids, labels}`.

The prompt is followed by the steps, each with the separator after it. The label of a step, its class, is that of the
last token of its separator; all other tokens have the label -100. Prompt, steps and separators are tokenised
separately, so the position of a label does not depend on the text around it.
"""

from typing import Any

from ebft.data.transforms.rows import IGNORE, encode, first_present, text_of
from ebft.errors import DataError

_FIX = "Rename the columns, or use a custom transform that returns input_ids and labels."


def transform(cfg, dataset, **kwargs):
    """Transform for a prompt with labelled steps."""

    def transform_fn(example, tokenizer=None):
        for column in ("prompt", "completions", "labels"):
            first_present(example, [column], column, _FIX)
        steps, classes = _steps(example)
        separator = encode(tokenizer, dataset.step_separator, special=False)
        completion, labels = [], []
        for number, (step, label) in enumerate(zip(steps, classes)):
            ids = [*encode(tokenizer, step, special=False), *separator]
            is_trained = not dataset.train_on_last_step_only or number == len(steps) - 1
            completion += ids
            labels += [*[IGNORE] * (len(ids) - 1), label if is_trained else IGNORE]
        kept = slice(dataset.max_completion_length)
        prompt = _prompt(tokenizer, text_of(example, "prompt"))
        return {"input_ids": [*prompt, *completion[kept]], "labels": [*[IGNORE] * len(prompt), *labels[kept]]}

    return transform_fn, {"remove_columns": "__all__"}


def _prompt(tokenizer: Any, text: str) -> list[int]:
    """The prompt after BOS, if the tokenizer has it; others would end the prompt with EOS as well."""
    ids, bos = encode(tokenizer, text, special=False), tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _steps(example: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The texts and the classes of the steps; booleans are the classes 0 and 1."""
    steps, labels = example["completions"] or [], example["labels"] or []
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise DataError("column 'completions' must contain a list with the text of each step.")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError("column 'labels' must contain a list with the class of each step (true, false or an integer).")
    if len(steps) != len(labels):
        raise DataError(f"the row has {len(steps)} steps in 'completions' and {len(labels)} in 'labels'.")
    return steps, [int(label) for label in labels]
