"""Transforms of text without a chat template, to `{input_ids, labels, prompt_length}`.

- `ebft_pretrain`: raw text with every token as a label, from the entry's `field`, else `text`, else `content`, else
  `question` followed by `answer` if the row has one, else `prompt` and `answer` (the columns of the paper authors'
  datasets of raw code and pairs). Special tokens are those that the tokenizer adds (such as BOS). Documents longer than
  `sequence_len` are later cut into consecutive windows, so no text is lost; only the first window starts with BOS.
- `completion`: the same with EOS at the end of each document, for SFT.
- `ebft_strided_structured`: a prompt and a completion (columns of `rows.PAIRS`), with nothing inserted between them.
- `alpaca`: `{instruction, input, output}` with the prompt text of Stanford Alpaca.
- `user_defined`: prompts written out in a format of the config.
- `input_output`: `{segments}`, each `{text, label}`; those with `label: true` are trained on. Each is tokenised on its
  own, and no special tokens are added, so that the segments contain all of them.

Those of pairs have a twin `_prompts` that returns `{prompt, ground_truth}`, both as text, for structured mode and
`rl: grpo`: the same tokens.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, groupby
from typing import Any

from ebft.config.section import PromptFormat
from ebft.data.transforms.rows import (
    Pair,
    encode,
    first_present,
    first_text,
    optional_text,
    pair_prompts,
    pair_tokens,
    prompt_and_completion,
    segments_row,
    text_of,
    text_row,
)
from ebft.errors import DataError


def ebft_pretrain(cfg, dataset, **kwargs):
    """Transform for a column of raw text."""
    columns = [dataset.field] if dataset.field else ["text", "content", "question"]

    def transform_fn(example, tokenizer=None):
        is_pair = not dataset.field and "answer" in example
        readable = [*columns, "prompt"] if is_pair else columns
        hint = "Set `field` of the entry to its name, or use the columns question and answer, or prompt and answer."
        column = first_present(example, readable, "text", hint)
        text = text_of(example, column)
        if column in ("question", "prompt") and is_pair:
            text += text_of(example, "answer")
        return text_row(encode(tokenizer, text, special=True) if text.strip() else [])

    return transform_fn, {"remove_columns": "__all__"}


def completion(cfg, dataset, **kwargs):
    """Transform for a column of raw text, including the end of the text."""
    raw_fn, map_kwargs = ebft_pretrain(cfg, dataset=dataset)

    def transform_fn(example, tokenizer=None):
        row = raw_fn(example, tokenizer=tokenizer)
        ids = row["input_ids"]
        if not ids or ids[-1] == tokenizer.eos_token_id or tokenizer.eos_token_id is None:
            return row
        return text_row([*ids, tokenizer.eos_token_id])

    return transform_fn, map_kwargs


def _both(pair_of: Callable[[Any], Pair]) -> tuple[Callable, Callable]:
    """The transforms to rows of tokens and of prompts for `pair_of(dataset)`, which reads prompt and completion."""
    return (
        lambda cfg, dataset, **kwargs: pair_tokens(cfg, pair_of(dataset)),
        lambda cfg, dataset, **kwargs: pair_prompts(pair_of(dataset)),
    )


ebft_strided_structured, ebft_strided_structured_prompts = _both(lambda dataset: prompt_and_completion)


def input_output(cfg, dataset, **kwargs):
    """Transform for rows of segments."""
    train_on_inputs = cfg.train_on_inputs
    columns = [dataset.field] if dataset.field else ["segments"]

    def transform_fn(example, tokenizer=None):
        column = first_present(example, columns, "segments", "Set `field` of the entry to its name.")
        segments = [
            (encode(tokenizer, text, special=False), label) for text, label in _segments(example[column], column)
        ]
        joined = [
            ([token for ids, _ in group for token in ids], label)
            for label, group in groupby((segment for segment in segments if segment[0]), key=lambda segment: segment[1])
        ]
        row = segments_row(joined or [([], True)], train_on_inputs)
        ends = list(accumulate(len(ids) for ids, _ in joined))
        row["turn_spans"] = [[end - len(ids), end] for end, (ids, label) in zip(ends, joined) if label]
        if joined and not joined[-1][1] and len(joined) > 1:
            row["prompt_length"] -= len(joined[-2][0])  # the last segment is not trained on
        return row

    return transform_fn, {"remove_columns": "__all__"}


def _segments(value: Any, column: str) -> list[tuple[str, bool]]:
    """The segments with a text. Raises DataError for another shape."""
    for number, segment in enumerate(value or []):
        if not isinstance(segment, dict) or not isinstance(segment.get("label"), bool):
            raise DataError(f"column {column!r}, segment {number}: expected {{text: ..., label: true or false}}.")
        if not isinstance(segment.get("text"), str | None):
            raise DataError(f"column {column!r}, segment {number}: text must be text, got {segment['text']!r:.60}.")
    return [(segment["text"], segment["label"]) for segment in value or [] if segment.get("text")]


WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_FIX = "Name its columns with a mapping as type: {field_instruction: ..., field_input: ..., field_output: ...}."


def _alpaca_pair(example: dict[str, Any]) -> tuple[str, str]:
    instruction, output = (
        first_text(example, [name], f"the {name}", _ALPACA_FIX) for name in ("instruction", "output")
    )
    given = optional_text(example, "input")
    return (WITH_INPUT if given else WITHOUT_INPUT).format(instruction=instruction, input=given), output


alpaca, alpaca_prompts = _both(lambda dataset: _alpaca_pair)


def _user_defined_pair(example: dict[str, Any], keys: PromptFormat) -> tuple[str, str]:
    fix = "Set {} to the name of the column."
    instruction = first_text(example, [keys.field_instruction], "the instruction", fix.format("field_instruction"))
    output = first_text(example, [keys.field_output], "the completion", fix.format("field_output"))
    given, system = (optional_text(example, name) for name in (keys.field_input, keys.field_system))
    system = system or keys.system_prompt or ""
    start = keys.system_format.format(system=system) if system else ""
    written = keys.format
    if not given and keys.no_input_format is not None:
        written = keys.no_input_format
    elif not given and written == PromptFormat.model_fields["format"].default:
        written = "{instruction}"
    return start + written.format(instruction=instruction, input=given), output


user_defined, user_defined_prompts = _both(
    lambda dataset: partial(_user_defined_pair, keys=dataset.user_defined or PromptFormat())
)
