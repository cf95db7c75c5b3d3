"""Masks and positions of the step-major layout [document | step 0 of all blocks | step 1 of all blocks | ...].

There is one rollout per block, and block b has the anchor `context_length + b * stride`. Intended for tests and
debugging, and for code written against this layout. The trainer does not use it: it keeps rollouts block-major and
never builds a dense mask (see layout.py and attention/).
"""

from __future__ import annotations

import torch
from torch import Tensor


def build_strided_position_ids(
    full_sequence_length: int,
    prompt_length: int,
    context_length: int,
    generation_step: int,
    stride: int,
    num_blocks: int,
    device: torch.device | str,
    batch_size: int = 1,
) -> Tensor:
    """Return the position ids (batch_size, full_sequence_length), long, after `generation_step` tokens per block.

    `prompt_length` is the document's length. Token t of block b has position `context_length + b * stride + t`.
    Entries after the generated tokens are 0. Raises ValueError if `full_sequence_length` is too short.
    """
    needed = prompt_length + generation_step * num_blocks
    if num_blocks < 1 or full_sequence_length < needed:
        raise ValueError(
            f"full_sequence_length ({full_sequence_length}) is too short: a document of {prompt_length} tokens with "
            f"{generation_step} generation steps of {num_blocks} blocks requires at least {needed}"
        )
    index = torch.arange(full_sequence_length, device=device)
    step, block = (index - prompt_length) // num_blocks, (index - prompt_length) % num_blocks
    generated = torch.where(step < generation_step, context_length + block * stride + step, 0)
    return torch.where(index < prompt_length, index, generated).expand(batch_size, -1).clone()


def build_strided_dense_mask_and_positions(
    full_sequence_length: int,
    prompt_length: int,
    context_length: int,
    generation_step: int,
    max_generation_length: int,
    stride: int,
    num_blocks: int,
    device: torch.device | str,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Return an additive mask (batch_size, 1, L, L) and the position ids (batch_size, L).

    The mask is 0 where attention is allowed and the minimum of `dtype` elsewhere. Entries after the generated tokens
    attend to nothing.
    """
    position_ids = build_strided_position_ids(
        full_sequence_length, prompt_length, context_length, generation_step, stride, num_blocks, device, batch_size
    )
    index = torch.arange(full_sequence_length, device=device)
    generated = min(generation_step, max_generation_length)
    visible = _visible(index[:, None], index, prompt_length, context_length, generated, stride, num_blocks)
    mask = torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)
    return mask.expand(batch_size, 1, -1, -1).clone(), position_ids


def create_strided_block_mask(
    prompt_length: int,
    context_length: int,
    max_generation_length: int,
    stride: int,
    num_blocks: int,
    full_sequence_length: int,
    batch_size: int,
    num_heads: int,
    device: torch.device | str,
):
    """Return the same pattern as a flex_attention `BlockMask`, shared by all heads.

    The parameters are captured as tensors, so that a compiled flex_attention is not recompiled for new anchors.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    given = prompt_length, context_length, max_generation_length, stride, num_blocks
    parameters = [torch.tensor(value, device=device) for value in given]

    def mask_mod(b, h, q_idx, kv_idx):
        return _visible(q_idx, kv_idx, *parameters)

    length = full_sequence_length
    return create_block_mask(mask_mod, B=batch_size, H=None, Q_LEN=length, KV_LEN=length, device=str(device))


def _visible(query, key, prompt_length, context_length, max_generation_length, stride, num_blocks):
    """Whether a query attends to a key, by index. Document tokens attend causally; generated tokens attend to their
    prefix and, causally, to their own block."""
    query_step, query_block = (query - prompt_length) // num_blocks, (query - prompt_length) % num_blocks
    key_step, key_block = (key - prompt_length) // num_blocks, (key - prompt_length) % num_blocks
    in_document = (query < prompt_length) & (key <= query)
    generated = (query >= prompt_length) & (query_step < max_generation_length)
    in_prefix = (key < prompt_length) & (key < context_length + query_block * stride)
    in_own_block = (key >= prompt_length) & (key_block == query_block) & (key_step <= query_step)
    return in_document | (generated & (in_prefix | in_own_block))
