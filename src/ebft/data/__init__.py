"""Data: any dataset the ecosystem loads, turned into rows of tokens or prompts by a transform, and into batches."""

from ebft.data.collator import DocumentCollator
from ebft.data.load import load_datasets
from ebft.data.packing import PackedRows, pack_rows
from ebft.data.prompts import load_prompts
from ebft.data.sources import read_source
from ebft.data.tokenise import tokenise

__all__ = ["DocumentCollator", "PackedRows", "load_datasets", "load_prompts", "pack_rows", "read_source", "tokenise"]
