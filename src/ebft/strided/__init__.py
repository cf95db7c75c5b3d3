"""Strided EBFT: many short rollouts along each document in one pass (Jelassi et al. 2026, appendix F).

trainer.py      the training step, top to bottom
layout.py       documents, anchors, blocks, chunks
rollout.py      sampling, block-parallel and cached
attention/      prefix and own block, never a dense mask
embed.py        features of blocks
logps.py        the head, where a token is scored           loss.py   scoring, the two loss terms, their gradients
policy.py       a causal LM that runs over a layout, inside what is wrapped around it
held_out.py     metrics on documents not trained on
validation.py   checks of arguments, model and rows         parity.py a short document against the plain model
interleaved.py  the published layout's masks and positions, for code written against it
"""

from ebft.over_transformers import override_attn_implementation
from ebft.strided.interleaved import (
    build_strided_dense_mask_and_positions,
    build_strided_position_ids,
    create_strided_block_mask,
)
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
