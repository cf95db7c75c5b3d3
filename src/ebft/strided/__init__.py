"""Strided EBFT: many short rollouts along each document in one pass (Jelassi et al. 2026, appendix F).

trainer.py    the training step, top to bottom
layout.py     documents, anchors, blocks, parts     attention.py  prefix + own block, never a dense mask
rollout.py    sampling, block-parallel and cached   tiles.py     the attention itself, with its backward
embed.py      features of blocks                    flex.py       the same by flex_attention, on GPUs
loss.py       scoring and the two loss terms        logps.py      the head, where a token is scored
policy.py     a causal LM that runs programs        held_out.py   metrics on documents not trained on
validation.py  checks before training                parity.py  a short document against the plain model
interleaved.py  the published layout's masks and positions, for code written against it
"""

from ebft.strided.interleaved import (
    build_strided_dense_mask_and_positions,
    build_strided_position_ids,
    create_strided_block_mask,
)
from ebft.strided.policy import override_attn_implementation
from ebft.strided.trainer import StridedEBFTConfig, StridedEBFTTrainer, StridedOutput

__all__ = [
    "StridedEBFTConfig",
    "StridedEBFTTrainer",
    "StridedOutput",
    "build_strided_dense_mask_and_positions",
    "build_strided_position_ids",
    "create_strided_block_mask",
    "override_attn_implementation",
]
