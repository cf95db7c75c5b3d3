"""The longest rows of the training data, which need the most memory, and the tokens of their forward pass."""

from __future__ import annotations

import json
import math
from typing import Any

from ebft.anchors import count_blocks, first_anchor
from ebft.config.schema import RunConfig
from ebft.data.lengths import token_counts
from ebft.data.packing import PackedRows

_CHARACTERS_PER_TOKEN = 3  # for prompts, whose tokens are counted for the longest ones only


def longest_rows(config: RunConfig, data: Any) -> Any:
    """Return the rows of the largest batch of one optimizer step on this process, longest first.

    `data` is a Dataset or PackedRows, and so is the result.
    """
    lengths = row_lengths(data)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])[: _rows_per_step(config)]
    return data.select(order)


def row_lengths(data: Any) -> list[int]:
    """Return the length of each row: in tokens, or in characters for prompts with their references."""
    if isinstance(data, PackedRows):
        return data.lengths
    if "input_ids" in data.column_names:
        return token_counts(data)
    columns = [name for name in ("prompt", "ground_truth", "remaining_turns") if name in data.column_names]
    return [len(json.dumps([row[name] for name in columns], ensure_ascii=False)) for row in data]


def forward_tokens(config: RunConfig, rows: Any) -> int:
    """Return the number of tokens in one training forward pass over the first micro-batch of `rows`, approximately."""
    if config.method.rows == "prompts":
        longest = max(row_lengths(rows)) // _CHARACTERS_PER_TOKEN
        return config.micro_batch_size * (min(longest, config.sequence_len) + config.trl.max_completion_length)
    batch = [rows[index] for index in range(min(config.micro_batch_size, len(rows)))]
    documents = [document for row in batch for document in row.get("documents", [row])]
    lengths = [len(document["input_ids"]) for document in documents]
    if not config.method.samples_blocks:
        return len(lengths) * max(lengths)  # padded
    return sum(lengths) + _rollout_tokens(config, documents)


def _rollout_tokens(config: RunConfig, documents: list[dict[str, Any]]) -> int:
    ebft = config.ebft
    blocks = sum(
        count_blocks(
            len(document["input_ids"]),
            first_anchor(document["prompt_length"], ebft.context_length, ebft.min_completion_prefix),
            ebft.stride,
            ebft.generate_max_len,
        )
        for document in documents
    )
    tokens = blocks * ebft.n_samples_per_prompt * ebft.generate_max_len
    return tokens if ebft.rollout_tokens_per_pass is None else min(tokens, ebft.rollout_tokens_per_pass)


def _rows_per_step(config: RunConfig) -> int:
    per_step = config.micro_batch_size * config.gradient_accumulation_steps
    if config.method.rows == "prompts":
        return math.ceil((config.trl.generation_batch_size or per_step) / config.trl.num_generations)
    return per_step
