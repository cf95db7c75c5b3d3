"""Checks of the keys of streams: what contradicts them, and what has no effect with or without a stream."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ebft.config.keys.data import DatasetEntry, DataSettings, StreamKeys
from ebft.data.transforms import LABELS, READ_BY_SOME, TRANSFORMS, built_in
from ebft.errors import DataError

if TYPE_CHECKING:
    from ebft.methods.method import MethodConfig

# Keys that are not supported with streaming, and what follows these words.
_NOT_STREAMED = {
    "val_set_size": ": a stream has no length. Set test_datasets, or remove it.",
    "excess_length_strategy": ", which cuts texts at the ends of rows, and chats at sequence_len. Remove it.",
    "dataset_exact_deduplication": ", which does not keep the documents that it has read. Remove it, or remove "
    "repeated documents from the files.",
    "group_by_length": ", where all rows have the same length. Remove it.",
}


def stream_problems(config: "MethodConfig") -> Iterator[str]:
    """Contradictions, one message each."""
    for where, entry in entries_of(config):
        if entry.skip and not (config.streaming and where.startswith("datasets")):
            yield f"{where}.skip is only read in datasets with streaming: true. Set split: train[{entry.skip}:]."
    if not config.streaming:
        return
    if not config.method.reads_streams:
        yield f"streaming is not supported with {config.method.name}. Set split to a part, such as train[:100000]."
        return
    if config.max_steps is None:
        yield "max_steps is missing: a stream has no length. A step trains on sequence_len tokens of each row."
    for key, reason in _NOT_STREAMED.items():
        if getattr(config, key):
            yield f"{key} is not supported with streaming{reason}"
    if config.dataloader_num_workers > 1:
        workers = config.dataloader_num_workers
        yield f"dataloader_num_workers: {workers} is not supported with streaming. Set it to 1 or 0."
    for number, entry in enumerate(config.datasets):
        where = f"datasets.{number}"
        if "[" in entry.split or "+" in entry.split:
            yield f"{where}.split: {entry.split} is not supported with streaming. Set skip to leave out the beginning."
        if entry.shards is not None:
            yield f"{where}.shards is not supported with streaming. Remove it, or name some of the files in data_files."


def idle_stream_keys(config: "MethodConfig") -> Iterator[str]:
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


def entry_conflicts(config: DataSettings) -> Iterator[str]:
    """Contradictions between the keys of datasets, one message each."""
    for where, entry in entries_of(config):
        if entry.shards is None and entry.shards_idx:
            yield f"{where}.shards_idx has no effect without shards. Set shards, or remove it."
        if entry.weight is not None and where.startswith("test_datasets"):
            yield f"{where}.weight has no effect: held-out rows are evaluated once. Remove it."
        names = [name for given in (entry.roles or {}).values() for name in given]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            yield f"{where}.roles: {', '.join(twice)} is listed for more than one role. Keep one."
        if entry.template_thinking_key != "reasoning_content" and str(_built_in(entry)).startswith("ebft_reasoning."):
            yield f"{where}.template_thinking_key is not supported with {entry.type}. Use type: chat_template."
        labels = [key for key in LABELS if _is_set(entry, key)]
        if config.train_on_inputs and labels:
            yield f"train_on_inputs: true trains on all tokens, but {where}.{labels[0]} is set. Remove one."
    # Rows that are not tokens are never cut, and steps always are.
    required, given = config.required_rows, config.excess_length_strategy
    only = {"tokens": None, "steps": "truncate"}.get(required.kind, "drop")
    if given is not None and only is not None and given != only:
        yield f"excess_length_strategy: {given} is not supported with {required.method}: always {only}. Remove it."
    if config.min_sample_len is not None and required.kind != "tokens":
        yield f"min_sample_len is not supported with {required.method}. Remove short rows from the data."
    if config.train_on_inputs and _roles(config):
        yield "train_on_inputs: true trains on all tokens, but roles_to_train is set. Remove one."


def entries_of(config: DataSettings) -> list[tuple[str, DatasetEntry]]:
    """The entries of both sections, each with its dotted key."""
    sections = {"datasets": config.datasets, "test_datasets": config.test_datasets}
    return [(f"{name}.{index}", entry) for name, entries in sections.items() for index, entry in enumerate(entries)]


def chat_templates(config: DataSettings) -> dict[str, str]:
    """The chat templates that datasets name, each with the dotted key that names it first."""
    found: dict[str, str] = {}
    for where, entry in entries_of(config):
        if entry.chat_template is not None:
            found.setdefault(entry.chat_template, where)
    return found


def idle_keys(config: DataSettings) -> Iterator[str]:
    """Warnings about keys of datasets that are set but have no effect."""
    required, entries = config.required_rows, entries_of(config)
    for where, entry in entries:
        name = _built_in(entry)
        for key in READ_BY_SOME if name is not None else ():
            if key not in TRANSFORMS[name].reads and _is_set(entry, key):
                readers = {other.partition(".")[0] for other, found in TRANSFORMS.items() if key in found.reads}
                those = ", ".join(sorted(readers))
                yield f"{where}.{key} has no effect with type: {entry.type}, which does not read it; {those} do."
        if entry.preprocess_shards is not None:
            yield f"{where}.preprocess_shards has no effect: rows are prepared in batches."
        if entry.trust_remote_code:
            yield f"{where}.trust_remote_code has no effect: the datasets library runs no code of a dataset."
    if required.kind == "tokens":
        for where, entry in entries:
            yield from _idle_labels(where, entry, _roles(config), is_strided=required.block is not None)
        return
    found = [f"{where}.{key}" for where, entry in entries for key in LABELS if _is_set(entry, key)] + _roles(config)
    if found:
        yield f"{', '.join(found)}: no effect with {required.method}, which determines the turns that are trained on."


# Transforms that determine the turns that are trained on.
_OF_FIXED_TURNS = (
    "ebft_strided_chat.transform_last_turn",
    "ebft_strided_chat.transform_all_turns",
    "ebft_reasoning.transform_strided",
)


def _idle_labels(where: str, entry: DatasetEntry, roles: list[str], is_strided: bool) -> Iterator[str]:
    if entry.empty_labels:
        keys = ", ".join(f"{where}.{key}" for key in entry.empty_labels)
        yield (
            f"{keys}: empty, so the default applies, which trains on every assistant turn and its end. To train on "
            "the last turn only, use type: ebft_strided_chat.transform_last_turn."
        )
    found = roles + [f"{where}.{key}" for key in (*LABELS, "field_tools") if _is_set(entry, key)]
    if found and entry.type in _OF_FIXED_TURNS:
        yield f"{', '.join(found)}: no effect with type: {entry.type}, which determines the turns."
    if is_strided and entry.train_on_eos == "all":  # the loss is restricted to turns, as the anchors are
        yield f"{where}.train_on_eos: all has the effect of turn in strided mode, which trains on turns only."


def _roles(config: DataSettings) -> list[str]:
    """The key roles_to_train, if its value is not the default, which may be written out."""
    return [] if config.roles_to_train in (None, ["assistant"]) else ["roles_to_train"]


def _is_set(entry: DatasetEntry, key: str) -> bool:
    """Whether a key has another value than its default, or than the default that is written out."""
    value: Any = getattr(entry, key)
    if key == "message_property_mappings":
        return not (value or {}).items() <= {"role": "role", "content": "content"}.items()
    default = DatasetEntry.model_fields[key].get_default(call_default_factory=True)
    written_out = {"roles_to_train": ["assistant"], "train_on_eos": "turn", "train_on_eot": "turn"}
    return value not in (default, written_out.get(key, default))


def _built_in(entry: DatasetEntry) -> str | None:
    try:
        return built_in(entry.type)
    except DataError:  # reported when the transforms are checked
        return None
