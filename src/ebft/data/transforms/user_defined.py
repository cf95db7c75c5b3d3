"""Prompts written out as text in a format of the config: `{instruction, input, output}` -> `{input_ids, labels}`.

`transform_prompts` returns `{prompt, ground_truth}`, both as text: the same tokens.
"""

from functools import partial
from typing import Any

from ebft.config.shapes import PromptFormat
from ebft.data.transforms.pairs import pair_prompts, pair_tokens
from ebft.data.transforms.rows import first_present, text_of

_FORMAT = PromptFormat.model_fields["format"].default


def transform(cfg, dataset, **kwargs):
    """Transform for rows with an instruction, an optional input and an output."""
    return pair_tokens(cfg, partial(_pair, keys=dataset.user_defined or PromptFormat()))


def transform_prompts(cfg, dataset, **kwargs):
    """Transform for rows whose prompt is continued as plain text."""
    return pair_prompts(partial(_pair, keys=dataset.user_defined or PromptFormat()))


def _pair(example: dict[str, Any], keys: PromptFormat) -> tuple[str, str]:
    instruction, output = (
        text_of(example, first_present(example, [name], wanted, f"Set {key} to the name of the column."))
        for key, name, wanted in (
            ("field_instruction", keys.field_instruction, "the instruction"),
            ("field_output", keys.field_output, "the completion"),
        )
    )
    given, system = (_optional(example, name) for name in (keys.field_input, keys.field_system))
    system = system or keys.system_prompt or ""
    start = keys.system_format.format(system=system) if system else ""
    return start + _format_of(keys, bool(given)).format(instruction=instruction, input=given), output


def _optional(example: dict[str, Any], column: str) -> str:
    return text_of(example, column) if column in example else ""


def _format_of(keys: PromptFormat, has_input: bool) -> str:
    if has_input:
        return keys.format
    if keys.no_input_format is not None:
        return keys.no_input_format
    return "{instruction}" if keys.format == _FORMAT else keys.format
