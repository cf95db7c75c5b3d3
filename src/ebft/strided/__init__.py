"""Strided EBFT: many short rollouts along each document in one pass (Jelassi et al. 2026, appendix F).

trainer.py      the trainer and its arguments; the training step, top to bottom
layout.py       positions of documents, anchors and blocks in a batch
passes.py       trees of rollouts, and attention of documents and rollouts, see ebft.prefix
rollout.py      block-parallel sampling with a key/value cache
loss.py         features of blocks, scoring, the two loss terms and their gradients
output.py       results of a step for users, metrics and the log of rollouts
held_out.py     metrics on held-out documents
validation.py   checks of arguments and rows, and comparison with the plain model on a short document
interleaved.py  masks and positions of the published layout, for code written against it
"""

from ebft.strided.interleaved import (
    build_strided_dense_mask_and_positions,
    build_strided_position_ids,
    create_strided_block_mask,
)
from ebft.strided.output import StridedOutput
from ebft.strided.trainer import StridedEBFTConfig, StridedEBFTTrainer
from ebft.transformers_internals import override_attn_implementation

__all__ = [
    "StridedEBFTConfig",
    "StridedEBFTTrainer",
    "StridedOutput",
    "build_strided_dense_mask_and_positions",
    "build_strided_position_ids",
    "create_strided_block_mask",
    "override_attn_implementation",
]
