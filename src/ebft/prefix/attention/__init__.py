"""Attention of a pass in which sequences share a prefix, without a mask of all tokens by all tokens.

passes.py              the attention function that is registered with transformers, and the passes' interface
tiles.py               tiled attention with its backward pass, and batching of small tiles for short documents
flex.py                the same attention with flex_attention, on GPUs
suffixes.py            prompts followed by suffixes of different lengths
decoding.py            the next tokens of samples that share prompts, and their cache
attention_adapters.py  layers that do not use transformers' attention interface
"""

from ebft.prefix.attention.decoding import DecodePass, SharedCache
from ebft.prefix.attention.flex import Visibility
from ebft.prefix.attention.passes import HINT, IMPLEMENTATION, MaskPattern, PrefixPass, document_attention
from ebft.prefix.attention.suffixes import PromptLayout, SuffixPass

__all__ = [
    "HINT",
    "IMPLEMENTATION",
    "DecodePass",
    "MaskPattern",
    "PrefixPass",
    "PromptLayout",
    "SharedCache",
    "SuffixPass",
    "Visibility",
    "document_attention",
]
