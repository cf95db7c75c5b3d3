"""Attention of a pass in which sequences share a prefix, without a mask of all tokens by all tokens.

passes.py              the attention function that is registered with transformers, and the passes' interface
tiles.py               tiled attention with its backward pass, and batching of small tiles for short documents
flex.py                the same attention with flex_attention, on GPUs
suffixes.py            prompts followed by suffixes of different lengths, and decoding of samples that share prompts
attention_adapters.py  layers that do not use transformers' attention interface
"""

from ebft.prefix.attention.flex import Tokens
from ebft.prefix.attention.passes import HINT, IMPLEMENTATION, MaskPattern, PrefixPass, document_attention
from ebft.prefix.attention.suffixes import DecodePass, PromptLayout, SharedCache, SuffixPass

__all__ = [
    "HINT",
    "IMPLEMENTATION",
    "DecodePass",
    "MaskPattern",
    "PrefixPass",
    "PromptLayout",
    "SharedCache",
    "SuffixPass",
    "Tokens",
    "document_attention",
]
