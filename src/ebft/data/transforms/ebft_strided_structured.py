"""Prompt/completion rows: `{input, output}` -> `{input_ids, labels, prompt_length}`.

Prompt and completion are tokenised apart, so no token spans the boundary and `prompt_length` is exact; nothing is put
between them. The completion ends with EOS. Other column names are taken from `PAIRS`, the first pair that the row has;
`instruction` with both `input` and `output` joins the first two by an empty line.
"""

from ebft.data.transforms.rows import encode, segments_row, text_of
from ebft.errors import DataError

PAIRS = (
    ("input", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("problem", "solution"),
)


def transform(cfg, **kwargs):
    """Transform for rows with a prompt and a reference completion."""
    train_on_inputs = cfg.train_on_inputs

    def transform_fn(example, tokenizer=None):
        prompt, completion = _prompt_and_completion(example)
        if not completion.strip():
            return segments_row([(encode(tokenizer, prompt, special=True), False), ([], True)], False)
        return segments_row(
            [
                (_without_eos(tokenizer, encode(tokenizer, prompt, special=True)), False),
                (_with_eos(tokenizer, encode(tokenizer, completion, special=False)), True),
            ],
            train_on_inputs,
        )

    return transform_fn, {"remove_columns": "__all__"}


def _prompt_and_completion(example: dict) -> tuple[str, str]:
    for prompt_column, completion_column in PAIRS:
        if prompt_column in example and completion_column in example:
            prompt = text_of(example, prompt_column)
            if prompt_column == "input" and "instruction" in example:
                prompt = "\n\n".join(part for part in (text_of(example, "instruction"), prompt) if part)
            return prompt, text_of(example, completion_column)
    known = ", ".join(f"{prompt}/{completion}" for prompt, completion in PAIRS)
    raise DataError(
        f"no prompt and completion columns: known pairs are {known}, the row has {', '.join(example)}. "
        "Rename the columns, or write a transform of your own."
    )


def _with_eos(tokenizer, ids: list[int]) -> list[int]:
    """A reference teaches the model where to stop."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token to end a completion with. Set special_tokens.eos_token.")
    return ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def _without_eos(tokenizer, ids: list[int]) -> list[int]:
    """Some tokenizers end every text with EOS; a prompt goes on."""
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
