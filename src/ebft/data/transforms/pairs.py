"""Prompt/completion rows as plain text: the supported names of their columns, and their tokens.

Prompt and completion are tokenised separately, so no token spans the boundary and `prompt_length` is exact. The
completion ends with EOS. `ebft.mask_thinking_ce` removes the labels of thinking blocks in the completion.
"""

from collections.abc import Callable
from typing import Any

from ebft.data.joined import ids_after, mask_after
from ebft.data.thinking import thinking_spans
from ebft.data.transforms.rows import continued_ids, encode, segments_row, text_of, without_labels
from ebft.errors import DataError

Pair = Callable[[dict[str, Any]], tuple[str, str]]  # prompt and completion of a row

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


def pair_tokens(cfg: Any, read: Pair) -> tuple[Callable, dict]:
    """Transform to rows of tokens; `read` returns prompt and completion."""
    train_on_inputs = cfg.train_on_inputs
    mask_thinking = cfg.ebft.mask_thinking_ce

    def transform_fn(example, tokenizer=None):
        prompt, completion = read(example)
        if not completion.strip():
            return segments_row([(encode(tokenizer, prompt, special=True), False), ([], True)], False)
        prompt_ids = continued_ids(tokenizer, prompt)
        completion_ids = ids_after(tokenizer, prompt, completion)
        # With an empty prompt, BOS is before the completion, which may have it too.
        has_own = not prompt and completion_ids[: len(prompt_ids)] == prompt_ids
        first = len(prompt_ids) if has_own else 0
        completion_ids = completion_ids[first:]
        row = segments_row([(prompt_ids, False), (_with_eos(tokenizer, completion_ids), True)], train_on_inputs)
        if not mask_thinking:
            return row
        thought = mask_after(tokenizer, prompt, completion, thinking_spans(completion))[first:]
        masked = [False] * len(prompt_ids) + thought
        return without_labels(row, masked + [False] * (len(row["labels"]) - len(masked)))  # its EOS is trained on

    return transform_fn, {"remove_columns": "__all__"}


def pair_prompts(read: Pair) -> tuple[Callable, dict]:
    """Transform to rows of prompts whose prompt is continued as plain text; `read` returns prompt and completion."""

    def transform_fn(example, tokenizer=None):
        prompt, completion = read(example)
        return {"prompt": prompt, "ground_truth": completion}

    return transform_fn, {"remove_columns": "__all__"}


def _with_eos(tokenizer, ids: list[int]) -> list[int]:
    """A reference ends with EOS, so that the model learns where to stop."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token to end a completion with. Set special_tokens.eos_token.")
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
