"""Checks of the keys of streams: what contradicts them, and what has no effect with or without a stream."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ebft.data.streaming.keys import StreamKeys

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

_COMPLETION = ("completion", "completion.transform")


def stream_problems(config: "RunConfig") -> Iterator[str]:
    """Contradictions, one message each."""
    if not config.streaming:
        for number, entry in enumerate(config.datasets):
            if entry.skip:
                yield f"datasets.{number}.skip is only read with streaming: true. Set split: train[{entry.skip}:]."
        yield from _of_test_datasets(config)
        return
    if not config.method.reads_streams:
        yield (
            f"streaming is not supported with {config.method.name}, which trains on rows that are prepared before "
            "training. Remove streaming, and set split of the datasets to a part, such as train[:100000]; or remove rl "
            "for SFT."
        )
        return
    if config.max_steps is None:
        yield (
            "max_steps is missing: a stream has no length, so the number of steps must be set. A step trains on "
            "sequence_len x micro_batch_size x gradient_accumulation_steps x processes tokens."
        )
    if config.val_set_size:
        yield "val_set_size is not supported with streaming: a stream has no length. Set test_datasets, or remove it."
    if config.excess_length_strategy:
        yield (
            "excess_length_strategy is not supported with streaming, where documents are cut at the ends of rows. "
            "Remove it."
        )
    if config.dataset_exact_deduplication:
        yield (
            "dataset_exact_deduplication is not supported with streaming, which does not keep the documents that it "
            "has read. Remove it, or remove repeated documents from the files."
        )
    if config.group_by_length:
        yield "group_by_length is not supported with streaming, where all rows have the same length. Remove it."
    if config.dataloader_num_workers > 1:
        yield (
            f"dataloader_num_workers: {config.dataloader_num_workers} is not supported with streaming: one worker "
            "reads a stream. Set it to 1 or 0."
        )
    for number, entry in enumerate(config.datasets):
        yield from _of_entry(f"datasets.{number}", entry)
    yield from _of_test_datasets(config)


def _of_entry(where: str, entry) -> Iterator[str]:
    if entry.type not in _COMPLETION:
        yield (
            f"{where}.type: {entry.type} is not supported with streaming, which reads raw text. Set type: completion, "
            "or remove streaming."
        )
    if "[" in entry.split or "+" in entry.split:
        yield (
            f"{where}.split: {entry.split} is not supported with streaming, which reads one whole split. Set skip to "
            "leave out its beginning, or use separate entries."
        )
    if entry.shards is not None:
        yield f"{where}.shards is not supported with streaming. Remove it, or name a part of the files in data_files."


def _of_test_datasets(config: "RunConfig") -> Iterator[str]:
    for number, entry in enumerate(config.test_datasets):
        if entry.skip:
            yield (
                f"test_datasets.{number}.skip is not supported: held-out rows are prepared. Set split: "
                f"train[{entry.skip}:]."
            )


def idle_stream_keys(config: "RunConfig") -> Iterator[str]:
    """Warnings about keys that are set but have no effect."""
    given = [key for key in StreamKeys.model_fields if key in config.model_fields_set]
    if not config.streaming:
        named = [key for key in given if getattr(config, key) != StreamKeys.model_fields[key].default]
        if named:
            yield f"{', '.join(named)}: no effect because streaming is not set."
        return
    reasons = {
        "dataset_prepared_path": "rows of a stream are not stored",
        "dataset_num_proc": "a stream is read by one process",
    }
    for key, reason in reasons.items():
        if getattr(config, key) not in (None, 1):
            yield f"{key} has no effect with streaming: {reason}."
    if config.batch_flattening is True:
        yield "batch_flattening has no effect with streaming: rows are filled, and need no padding."
    if not config.sample_packing and "sample_packing" in config.model_fields_set:
        yield "sample_packing: false has no effect with streaming: documents always fill rows of sequence_len tokens."
