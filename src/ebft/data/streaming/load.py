"""The rows of a run that trains on a stream: the stream itself, and the held-out rows, which are prepared."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.load import LoadedRows, load_section_of_tokens
from ebft.data.streaming.documents import Document, Documents, MixedDocuments, Source
from ebft.data.streaming.rows import StreamRows
from ebft.data.streaming.settings import StreamSettings
from ebft.data.streaming.sources import open_source, problem
from ebft.data.tokenise import tokeniser

# Keys of a dataset that determine its documents. Files may have moved, so paths are not compared.
_SOURCE = ("name", "split", "revision", "field", "skip", "ds_type", "weight")


def load_stream(config: StreamSettings, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """The stream of `datasets`, and the rows of `test_datasets`, if any.

    The first row of each source is read, so that sources that cannot be used are reported before a model is loaded.
    """
    stream = stream_rows(config, tokenizer)
    if not config.test_datasets:
        return LoadedRows(stream, None, [])
    evaluation, found = load_section_of_tokens(config, tokenizer, "test_datasets")
    return LoadedRows(stream, evaluation, [found])


def stream_rows(config: StreamSettings, tokenizer: PreTrainedTokenizerBase) -> StreamRows:
    """The stream of `datasets`."""
    functions = [tokeniser(entry, config, tokenizer) for entry in config.datasets]
    for number, source in enumerate(_sources(config.datasets)):
        _tokens(functions, Document(number, *source.next_row()))
    seed = config.seed if config.data_seed is None else config.data_seed
    order = seed if config.shuffle_merged_datasets else None
    open_all, size = partial(_sources, config.datasets), config.streaming_multipack_buffer_size
    weights = [entry.weight for entry in config.datasets]
    if any(weight is not None for weight in weights):
        shares = [1.0 if weight is None else weight for weight in weights]
        documents: Documents = MixedDocuments(open_all, size, order, shares)
    else:
        documents = Documents(open_all, size, order)
    encode = partial(_tokens, functions)
    return StreamRows(documents, encode, config.sequence_len, config.pretrain_multipack_attn)


def order_of(config: StreamSettings) -> dict[str, Any]:
    """The settings that the order of the documents depends on, by key, as JSON values."""
    entries = [entry.model_dump(include=set(_SOURCE), exclude_defaults=True) for entry in config.datasets]
    shuffles = config.shuffle_merged_datasets
    seed = config.seed if config.data_seed is None else config.data_seed
    return {
        "datasets": entries,
        "shuffle_merged_datasets": shuffles,
        "streaming_multipack_buffer_size": config.streaming_multipack_buffer_size,
        "data_seed": seed if shuffles else None,
    }


def _sources(entries: list[Any]) -> list[Source]:
    return [
        Source(f"{entry.path}, {entry.split}", open_source(entry), entry.skip, partial(problem, entry))
        for entry in entries
    ]


def _tokens(functions: list[Any], document: Document) -> list[int]:
    return functions[document.source](document.row, document.number)["input_ids"]
