"""The chat template's end of turn as an end-of-sequence token of the trained model, so that generate() stops at it.

Chat models declare it in their generation config. A base model that is trained on chats does not, unless its tokenizer
ends texts and turns with the same token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ebft.config.schema import RunConfig
from ebft.data.conversation import Renderer
from ebft.durable import write_text
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.pretrained import GENERATION_CONFIG

_ROWS = 8  # that are read to find whether replies end with the token


def declare_end_of_turn(
    config: RunConfig, model: Any, tokenizer: PreTrainedTokenizerBase, rows: Any
) -> Callable[[Path], None] | None:
    """Add the end of turn that `rows` teach to the generation config, which is saved with a full model.

    For an adapter, returns a function that saves the generation config in its folder, for `ebft merge-lora`. Other
    programs do not read it there, so there is one warning, unless the tokenizer has the token as end of sequence.
    """
    causal_lm = unwrap_adapter(model)
    if config.streaming or not causal_lm.can_generate() or causal_lm.generation_config is None:
        return None
    renderer, known = Renderer(tokenizer, config.chat_template_kwargs), _eos_ids(causal_lm.generation_config)
    end = renderer.end_of_turn_id
    if end is None or end in known or not _are_taught(rows, end, {*known, tokenizer.eos_token_id}):
        return None
    causal_lm.generation_config.eos_token_id = [*known, end]
    if config.adapter is None:
        return None
    if end != tokenizer.eos_token_id:
        token = tokenizer.convert_ids_to_tokens(end)
        warnings.warn(
            f"special_tokens.eos_token: the chat template ends replies with {token}, which is not an end-of-sequence "
            "token of the base model, and an adapter has no generation config of its own, so generate() does not stop "
            f"there. Set special_tokens.eos_token: {token}, which is saved with the tokenizer, or pass eos_token_id to "
            "generate(); models of ebft merge-lora and ebft inference stop there anyway.",
            stacklevel=2,
        )
    return partial(_write, causal_lm.generation_config)


def _write(found: GenerationConfig, folder: Path) -> None:
    """Not `save_pretrained`, which refuses combinations that some base models have."""
    write_text(folder / GENERATION_CONFIG, found.to_json_string())


def _eos_ids(config: GenerationConfig) -> list[int]:
    found = config.eos_token_id
    return [found] if isinstance(found, int) else list(found or [])


def _are_taught(rows: Any, end: int, eos: set[int | None]) -> bool:
    return any(_is_taught(rows[index], end, eos) for index in range(min(_ROWS, len(rows))))


def _is_taught(row: dict[str, Any], end: int, eos: set[int | None]) -> bool:
    """Whether a reply of a row of any method ends with the token `end`."""
    if "documents" in row:  # packed
        return any(_is_taught(document, end, eos) for document in row["documents"])
    if "prompt" in row:  # replies to messages are sampled up to it
        return not isinstance(row["prompt"], str)
    if "labels" in row:
        return end in row["labels"]
    ids = row["chosen_ids"] if "chosen_ids" in row else row["completion_ids"]
    return end in ids and ids[-1] not in eos - {end}  # formats of texts write EOS after it
