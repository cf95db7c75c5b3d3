"""Functions shared by the built-in transforms: reading a text column, tokenising, and the fields of a row.

A row that cannot be trained on (no text, no prompt, no reference) is returned without tokens or without labels; it is
then counted and dropped.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.tokens import LONGEST, ids_after, mask_after, thinking_spans, token_ids
from ebft.errors import DataError

IGNORE = -100  # label of tokens that are ignored in the loss


def has_column(example: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column, or a message a key; `a.b` is the key b of a, which may be missing as a whole."""
    try:
        value_of(example, name)
    except KeyError:
        return False
    return True


def value_of(example: Mapping[str, Any], name: str) -> Any:
    """The value of a column; `a.b` is the key b of column a, unless a column has this name. Raises KeyError."""
    if name in example:
        return example[name]
    value: Any = example
    for key in name.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[key]
    return value


def text_of(example: Mapping[str, Any], column: str) -> str:
    """The text in a column, empty for a missing value. Raises DataError if it is not text."""
    value = value_of(example, column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"column {column!r} must contain text, got {type(value).__name__}")
    return value


def optional_text(example: dict[str, Any], column: str) -> str:
    """The text in a column, empty if the row does not have it."""
    return text_of(example, column) if has_column(example, column) else ""


def first_text(example: dict[str, Any], columns: list[str], wanted: str, fix: str) -> str:
    """The text in `first_present`."""
    return text_of(example, first_present(example, columns, wanted, fix))


def first_present(example: dict[str, Any], columns: list[str], wanted: str, fix: str) -> str:
    """The first of `columns` that the row has. Raises DataError with what is `wanted` and how to `fix` it."""
    found = first_shape(example, [(column,) for column in columns])
    if found is None:
        raise DataError(
            f"no column with {wanted}: expected {', '.join(columns)}, but the row has {', '.join(example)}. {fix}"
        )
    return found[0]


def first_shape(example: dict[str, Any], shapes: Iterable[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The first of `shapes`, names of columns, that the row has; one with values before others, None if there is none.

    Rows of a source can have different shapes: then each has the columns of all, without values.
    """
    found = [names for names in shapes if all(has_column(example, name) for name in names)]
    filled = (names for names in found if all(value_of(example, name) is not None for name in names))
    return next(filled, found[0] if found else None)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    """Token ids of a text, with the special tokens that the tokenizer adds (such as BOS) if `special`.

    They are not added to a text that already starts or ends with them.
    """
    if not special:
        return token_ids(tokenizer, text)
    before, after = _added_ids(tokenizer)
    if len(text) > LONGEST:
        ids = token_ids(tokenizer, text)
        start = [] if ids[: len(before)] == before else before
        return [*start, *ids, *([] if after and ids[-len(after) :] == after else after)]
    ids = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
    if before and ids[: 2 * len(before)] == before * 2:
        ids = ids[len(before) :]
    if after and ids[-2 * len(after) :] == after * 2:
        ids = ids[: -len(after)]
    return ids


def _added_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    own, whole = (tokenizer("x", add_special_tokens=added, verbose=False)["input_ids"] for added in (False, True))
    start = next((start for start in range(len(whole)) if whole[start : start + len(own)] == own), len(whole))
    return whole[:start], whole[start + len(own) :]


def continued_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a text that is continued, with the special tokens that the tokenizer puts before it.

    Some tokenizers end every text with EOS, which is removed; an EOS in the text itself, such as the end of a turn, is
    kept.
    """
    ids, eos = encode(tokenizer, prompt, special=True), tokenizer.eos_token_id
    if ids[-1:] != [eos]:
        return ids
    own = encode(tokenizer, prompt, special=False)
    return ids if _ending(ids, eos) == _ending(own, eos) else ids[:-1]


def _ending(ids: list[int], token: int) -> int:
    """How many times `ids` ends with a token."""
    return next((number for number, other in enumerate(reversed(ids)) if other != token), len(ids))


def text_row(input_ids: list[int]) -> dict[str, Any]:
    """Fields of a raw text: all tokens are labels, and there is no prompt."""
    return {
        "input_ids": input_ids,
        "attention_mask": [1] * len(input_ids),
        "labels": list(input_ids),
        "prompt_length": 0,
    }


def row_without_prompt() -> dict[str, Any]:
    """Fields of a pair or a chat in which nothing precedes the reference."""
    return {**text_row([]), "prompt_length": None}


def segments_row(segments: list[tuple[list[int], bool]], train_on_inputs: bool) -> dict[str, Any]:
    """Fields of a row that consists of (token ids, trained on) segments, the last of which is the reference.

    `prompt_length` counts all tokens before the last segment. Labels are -100 for tokens that are not trained on.
    """
    input_ids = [token for ids, _ in segments for token in ids]
    labels = [token if trained or train_on_inputs else IGNORE for ids, trained in segments for token in ids]
    return {
        "input_ids": input_ids,
        "attention_mask": [1] * len(input_ids),
        "labels": labels,
        "prompt_length": len(input_ids) - len(segments[-1][0]),
    }


def without_labels(row: dict[str, Any], masked: list[bool]) -> dict[str, Any]:
    """The row with label -100 for the tokens that are `masked`."""
    labels = [IGNORE if off else label for label, off in zip(row["labels"], masked, strict=True)]
    return {**row, "labels": labels}


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
    found = first_shape(example, PAIRS)
    if found is None:
        known = ", ".join(f"{prompt}/{completion}" for prompt, completion in PAIRS)
        raise DataError(
            f"no prompt and completion columns: supported pairs are {known}, but the row has {', '.join(example)}. "
            "Rename the columns, or write a custom transform."
        )
    prompt, completion = (text_of(example, name) for name in found)
    if found[0] == "input":
        prompt = "\n\n".join(part for part in (optional_text(example, "instruction"), prompt) if part)
    return prompt, completion


def each_row(read: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[Callable, dict]:
    """Transform that needs no tokenizer; `read` returns the fields of a row."""
    return (lambda example, tokenizer=None: read(example)), {"remove_columns": "__all__"}


def pair_prompts(read: Pair) -> tuple[Callable, dict]:
    """Transform to rows of prompts whose prompt is continued as plain text; `read` returns prompt and completion."""
    return each_row(lambda example: dict(zip(("prompt", "ground_truth"), read(example))))


def pair_tokens(cfg: Any, read: Pair) -> tuple[Callable, dict]:
    """Transform to rows of tokens; `read` returns prompt and completion."""
    train_on_inputs = cfg.train_on_inputs
    mask_thinking = cfg.ebft.mask_thinking_ce

    def transform_fn(example, tokenizer=None):
        prompt, completion = read(example)
        if not prompt.strip():
            return row_without_prompt()
        if not completion.strip():
            return segments_row([(encode(tokenizer, prompt, special=True), False), ([], True)], False)
        prompt_ids = continued_ids(tokenizer, prompt)
        completion_ids = ids_after(tokenizer, prompt, completion)
        row = segments_row([(prompt_ids, False), (_with_eos(tokenizer, completion_ids), True)], train_on_inputs)
        if not mask_thinking:
            return row
        row["turn_spans"] = [[row["prompt_length"], len(row["input_ids"])]]  # thinking is sampled too
        thought = mask_after(tokenizer, prompt, completion, thinking_spans(completion))
        masked = [False] * len(prompt_ids) + thought
        return without_labels(row, masked + [False] * (len(row["labels"]) - len(masked)))  # its EOS is trained on

    return transform_fn, {"remove_columns": "__all__"}


def _with_eos(tokenizer, ids: list[int]) -> list[int]:
    """A reference ends with EOS, so that the model learns where to stop."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token to end a completion with. Set special_tokens.eos_token.")
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
