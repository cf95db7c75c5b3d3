"""Attention of a strided pass: each rollout sees its document's prefix and itself, and no dense mask is ever made.

passes.py   which attention each part of a pass takes, registered with transformers
tiles.py    the attention itself, with its backward        stacks.py   tiles of short documents that share kernel calls
flex.py     the same by flex_attention, on GPUs
"""

from ebft.strided.attention.passes import IMPLEMENTATION, StridedPass

__all__ = ["IMPLEMENTATION", "StridedPass"]
