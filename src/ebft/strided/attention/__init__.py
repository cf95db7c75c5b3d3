"""Attention of a strided pass: a rollout attends to its document's prefix and to itself, without a dense mask.

passes.py   selection of the attention for each part of a pass, registered with transformers
tiles.py    tiled attention with its backward pass
stacks.py   batching of small tiles into shared kernel calls, for short documents
flex.py     the same attention with flex_attention, on GPUs
"""

from ebft.strided.attention.passes import IMPLEMENTATION, StridedPass

__all__ = ["IMPLEMENTATION", "StridedPass"]
