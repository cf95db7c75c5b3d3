"""Rows of Alpaca, `{instruction, input, output}`, with the prompt text of Stanford Alpaca.

`transform_prompts` returns `{prompt, ground_truth}`, both as text: the same tokens.
"""

from typing import Any

from ebft.data.transforms.pairs import pair_prompts, pair_tokens
from ebft.data.transforms.rows import first_present, text_of

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_FIX = "Name its columns with a mapping as type: {field_instruction: ..., field_input: ..., field_output: ...}."


def transform(cfg, **kwargs):
    """Transform for rows of Alpaca."""
    return pair_tokens(cfg, _pair)


def transform_prompts(cfg, **kwargs):
    """Transform for rows of Alpaca whose prompt is continued as plain text."""
    return pair_prompts(_pair)


def _pair(example: dict[str, Any]) -> tuple[str, str]:
    instruction, output = (
        text_of(example, first_present(example, [name], f"the {name}", _FIX)) for name in ("instruction", "output")
    )
    given = text_of(example, "input") if "input" in example else ""
    return (WITH_INPUT if given else WITHOUT_INPUT).format(instruction=instruction, input=given), output
