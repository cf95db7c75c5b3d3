"""Strided EBFT: many short rollouts along each document in one pass (Jelassi et al. 2026, appendix F).

layout.py     anchors, blocks, positions            attention.py  prefix + own block, never a dense mask
policy.py     a causal LM that can run over them    rollout.py    sampling, block-parallel and cached
embed.py      features of blocks                    loss.py       log-probabilities and the two loss terms
trainer.py    the training step, top to bottom      interleaved.py  step-major masks for tests and debugging
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
