"""Checks of the keys of streams: what contradicts them, and what has no effect with or without a stream."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ebft.data.keys import DatasetEntry, DataSettings, StreamKeys
from ebft.data.transforms import LABELS, READ_BY_SOME, TRANSFORMS, built_in
from ebft.errors import DataError

if TYPE_CHECKING:
    from ebft.methods.method import MethodConfig

_COMPLETION = ("completion", "completion.transform")


def stream_problems(config: "MethodConfig") -> Iterator[str]:
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


def _of_test_datasets(config: "MethodConfig") -> Iterator[str]:
    for number, entry in enumerate(config.test_datasets):
        if entry.skip:
            yield (
                f"test_datasets.{number}.skip is not supported: held-out rows are prepared. Set split: "
                f"train[{entry.skip}:]."
            )


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


# The defaults may be written out with any transform.
_PLAIN_NAMES = {"role": "role", "content": "content"}


def entry_conflicts(config: DataSettings) -> Iterator[str]:
    """Contradictions between the keys of datasets, one message each."""
    for where, entry in entries_of(config):
        yield from _unread(where, entry)
        if entry.shards is None and entry.shards_idx:
            yield f"{where}.shards_idx has no effect without shards. Set shards, or remove it."
        elif entry.shards is not None and entry.shards_idx >= entry.shards:
            yield f"{where}.shards_idx: {entry.shards_idx} must be less than shards: {entry.shards}."
        if entry.weight is not None and where.startswith("test_datasets"):
            yield f"{where}.weight has no effect: held-out rows are evaluated once. Remove it."
        if entry.trust_remote_code:
            yield (
                f"{where}.trust_remote_code: datasets that consist of a Python program are not supported by the "
                "datasets library. Remove it, and use a version of the dataset in Parquet or JSON."
            )
        names = [name for given in (entry.roles or {}).values() for name in given]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            yield f"{where}.roles: {', '.join(twice)} is listed for more than one role. Keep one of them."
        if entry.template_thinking_key != "reasoning_content" and str(_built_in(entry)).startswith("ebft_reasoning."):
            yield f"{where}.template_thinking_key is not supported with {entry.type}. Use type: chat_template."
        labels = [key for key in LABELS if _is_set(entry, key)]
        if config.train_on_inputs and labels:
            yield f"train_on_inputs: true trains on all tokens, but {where}.{labels[0]} is set. Remove one of them."
    yield from _strategy(config)
    if config.train_on_inputs and config.roles_to_train not in (None, ["assistant"]):
        yield "train_on_inputs: true trains on all tokens, but roles_to_train is set. Remove one of them."


def _strategy(config: DataSettings) -> Iterator[str]:
    """Rows that are not tokens are never cut, and steps always are."""
    required, given = config.required_rows, config.excess_length_strategy
    only = {"tokens": None, "steps": "truncate"}.get(required.kind, "drop")
    if given is not None and only is not None and given != only:
        yield (
            f"excess_length_strategy: {given} is not supported with {required.method}, where it is always {only}. "
            "Remove it."
        )


def entries_of(config: DataSettings) -> list[tuple[str, DatasetEntry]]:
    """The entries of both sections, each with its dotted key."""
    sections = {"datasets": config.datasets, "test_datasets": config.test_datasets}
    return [(f"{name}.{index}", entry) for name, entries in sections.items() for index, entry in enumerate(entries)]


def chat_templates(config: DataSettings) -> dict[str, str]:
    """The chat templates that datasets name, each with the dotted key of the first of them."""
    found: dict[str, str] = {}
    for where, entry in entries_of(config):
        if entry.chat_template is not None:
            found.setdefault(entry.chat_template, where)
    return found


def idle_keys(config: DataSettings) -> Iterator[str]:
    """Warnings about keys of datasets that are set but have no effect."""
    for where, entry in entries_of(config):
        if entry.preprocess_shards is not None:
            yield f"{where}.preprocess_shards has no effect: rows are prepared in batches."
    required = config.required_rows
    if required.kind == "tokens":
        yield from _empty_labels(config)
        yield from _labels_of_one_turn(config)
        if required.block is not None:
            yield from _ends_between_turns(config)
        return
    found = [f"{where}.{key}" for where, entry in entries_of(config) for key in LABELS if _is_set(entry, key)]
    found += ["roles_to_train"] if config.roles_to_train not in (None, ["assistant"]) else []
    if found:
        yield f"{', '.join(found)}: no effect with {required.method}, which determines the turns that are trained on."
    tools = [f"{where}.field_tools" for where, entry in entries_of(config) if _is_set(entry, "field_tools")]
    if tools:
        yield f"{', '.join(tools)}: no effect with {required.method}, which renders chats without tools of rows."


def _empty_labels(config: DataSettings) -> Iterator[str]:
    for where, entry in entries_of(config):
        if entry.empty_labels:
            keys = ", ".join(f"{where}.{key}" for key in entry.empty_labels)
            yield (
                f"{keys}: empty, so the default applies, which trains on every assistant turn and its end. To train on "
                "the last turn only, use type: ebft_strided_chat.transform_last_turn."
            )


def _labels_of_one_turn(config: DataSettings) -> Iterator[str]:
    fixed = [f"ebft_strided_chat.transform_{turns}" for turns in ("last_turn", "all_turns")]
    fixed.append("ebft_reasoning.transform_strided")
    of_all = ["roles_to_train"] if config.roles_to_train not in (None, ["assistant"]) else []
    for where, entry in entries_of(config):
        found = of_all + [f"{where}.{key}" for key in (*LABELS, "field_tools") if _is_set(entry, key)]
        if found and entry.type in fixed:
            yield (
                f"{', '.join(found)}: no effect with type: {entry.type}, which determines the turns that are trained "
                "on. Use type: ebft_strided_chat.transform."
            )


def _ends_between_turns(config: DataSettings) -> Iterator[str]:
    """The loss of strided mode is restricted to turns, as the anchors are."""
    for where, entry in entries_of(config):
        if entry.train_on_eos == "all":
            yield (
                f"{where}.train_on_eos: all has the effect of turn in strided mode, whose cross-entropy is restricted "
                "to the turns that are trained on."
            )


def _unread(where: str, entry: DatasetEntry) -> Iterator[str]:
    name = _built_in(entry)
    if name is None:
        return
    for key in READ_BY_SOME:
        if key not in TRANSFORMS[name].reads and _is_set(entry, key):
            readers = dict.fromkeys(
                other.partition(".")[0] for other, found in TRANSFORMS.items() if key in found.reads
            )
            # The most general one first. That of NeMo Gym reads other files.
            modules = sorted({*readers} - {"nemo_gym"}, key=["chat_template", *readers].index)
            yield (
                f"{where}.{key} has no effect with type: {entry.type}, which does not read it. Remove it, or use "
                f"{' or '.join(f'type: {module}' for module in modules)}."
            )


def _is_set(entry: DatasetEntry, key: str) -> bool:
    """Whether a key has another value than its default, or than the default that is written out."""
    value: Any = getattr(entry, key)
    default = DatasetEntry.model_fields[key].get_default(call_default_factory=True)
    harmless = {
        "message_property_mappings": _PLAIN_NAMES.items() >= (value or {}).items() if isinstance(value, dict) else True,
        "roles_to_train": value == ["assistant"],
        "train_on_eos": value == "turn",
        "train_on_eot": value == "turn",
    }
    return value != default and not harmless.get(key, False)


def _built_in(entry: DatasetEntry) -> str | None:
    try:
        return built_in(entry.type)
    except DataError:  # reported when the transforms are checked
        return None
