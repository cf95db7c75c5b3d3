"""Strided EBFT: many short rollouts along each document in one pass (Jelassi et al. 2026, appendix F).

trainer.py      the training step, top to bottom
layout.py       positions of documents, anchors and blocks in a batch
rollout.py      block-parallel sampling with a key/value cache
attention/      attention to the prefix and the own block, without a dense mask
embed.py        features of blocks
logps.py        log-probabilities; the language model head is applied to scored positions only
loss.py         scoring, the two loss terms and their gradients
policy.py       running a causal LM over a layout, inside its wrappers (DDP, FSDP, PEFT)
held_out.py     metrics on held-out documents
validation.py   checks of arguments, model and rows
parity.py       comparison with the plain model on a short document
interleaved.py  masks and positions of the published layout, for code written against it
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
