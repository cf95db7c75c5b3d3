"""Merging a LoRA adapter into its base model, one shard at a time.

At any time, the adapter, the weights of one part (usually one weight), and what they are computed from are in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from ebft.errors import ModelError
from ebft.export.adapter import WEIGHTS, Adapter, attach, empty_model, read_adapter_config, read_adapter_weights
from ebft.export.checkpoint import PICKLED, Checkpoint, Reader, base_folder
from ebft.export.parts import Merge, Part
from ebft.export.rounding import BitsAndBytesRounding
from ebft.export.shards import ShardFolder, checksum, parse_size, shard_names, split, write_index, write_text
from ebft.fetch.catalog import MARK
from ebft.models.pretrained import GENERATION_CONFIG

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_NOT_COPIED = (
    "*.safetensors",
    "*.index.json",
    *PICKLED,
    "*.gguf",
    "*.msgpack",
    "*.h5",
    "*.onnx",
    "README.md",
    MARK,
    ".*",
)


@dataclass(frozen=True)
class MergeSource:
    """An adapter and the base model that it was trained on, both folders or Hub ids.

    `tokenizer`: folder whose tokenizer files replace those of the base model. `bits` (4 or 8): the base weights were
    quantised by bitsandbytes in training, loaded in `dtype`.
    """

    adapter: Path
    base: str
    revision: str | None = None
    trust_remote_code: bool = False
    tokenizer: Path | None = None
    bits: int | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class MergeResult:
    """The folder of a merged model, the size of its weights in bytes, and numbers of shards."""

    folder: Path
    total_size: int
    largest_shard: int  # bytes
    shards: int
    resumed: int  # shards that a previous, interrupted merge had written
    untied: bool


def merge_adapter(
    source: MergeSource,
    to: Path,
    max_shard_size: str | None = None,
    on_shard: Callable[[int, int], None] | None = None,
) -> MergeResult:
    """Write the base model with the adapter merged into its weights to the folder `to`.

    The result is that of PEFT's `merge_and_unload`, except that weights that are tied in the base model, and of which
    the adapter changes one, are written separately: PEFT changes both. The shards are those of the base model unless
    `max_shard_size` (such as "5GB") is given. If a merge was interrupted, a second call continues it. `on_shard` is
    called with the number of finished shards and of all shards. Raises ModelError if the adapter or the base model
    cannot be merged.
    """
    size = None if max_shard_size is None else parse_size(max_shard_size)
    config, weights = read_adapter_config(source.adapter), read_adapter_weights(source.adapter)
    base = base_folder(source.base, source.revision)
    base_config = _base_config(base, source)
    checkpoint = Checkpoint.of(base)
    plain = empty_model(base_config, source.trust_remote_code)
    rounding = None if source.bits is None else BitsAndBytesRounding(plain, source.bits, source.dtype)
    adapter = attach(empty_model(base_config, source.trust_remote_code), config, weights)
    del weights
    merge = Merge(plain, adapter, checkpoint.weights, rounding)
    shards = _layout(merge, checkpoint, size)
    folder = ShardFolder(to, _identity(source, checkpoint, shards))
    resumed = _write_shards(merge, checkpoint, shards, folder, on_shard)
    sizes = _sizes(merge, shards)
    _copy_other_files(base, source.tokenizer, to)
    _copy_generation_config(source.adapter, to)
    if len(shards) > 1:
        write_index(to, shards, sum(sizes))
    _write_config(base_config, adapter, merge, to)
    folder.finish()
    return MergeResult(to, sum(sizes), max(sizes), len(shards), resumed, merge.unties)


def _base_config(base: Path, source: MergeSource) -> Any:
    try:
        found = AutoConfig.from_pretrained(base, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{base}: its config.json cannot be read: {error}") from error
    if (quantised := getattr(found, "quantization_config", None)) is not None:  # absent in most models
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"The weights in {base} are stored quantised ({method}), so an adapter cannot be added to them. Use the "
            "original model, which they were quantised from (--base-model)."
        )
    return found


def _layout(merge: Merge, checkpoint: Checkpoint, max_size: int | None) -> dict[str, list[str]]:
    """The weights of each shard. A weight that the base model does not have follows the one it was tied to."""
    weights = {key: weight for part in merge.parts for key, weight in part.outputs.items()}
    added = {source: [] for part in merge.parts for source in part.copies.values()}
    for part in merge.parts:
        for name, source in part.copies.items():
            added[source].append(name)
    files = []
    for own in checkpoint.files.values():
        files.append([])
        for key in own:
            files[-1] += [key, *added.pop(key, [])]
    for names in added.values():  # the checkpoint has another name for the weight that it was tied to
        files[-1] += names
    if max_size is not None:
        files = list(split({key: weights[key] for keys in files for key in keys}, max_size))
    return dict(zip(shard_names(len(files)), files))


def _sizes(merge: Merge, shards: dict[str, list[str]]) -> list[int]:
    weights = {key: weight for part in merge.parts for key, weight in part.outputs.items()}
    return [sum(weights[key].nbytes for key in keys) for keys in shards.values()]


def _identity(source: MergeSource, checkpoint: Checkpoint, shards: dict[str, list[str]]) -> dict[str, Any]:
    """Everything that the merged weights depend on; files of the base model by size and time, as they are large."""
    files = {name: (checkpoint.folder / name).resolve().stat() for name in checkpoint.files}
    return {
        "adapter": [checksum(source.adapter / name) for name in ("adapter_config.json", WEIGHTS)],
        "base": [str(checkpoint.folder), {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()}],
        "bits": [source.bits, str(source.dtype)],
        "shards": shards,
    }


def _write_shards(
    merge: Merge,
    checkpoint: Checkpoint,
    shards: dict[str, list[str]],
    folder: ShardFolder,
    on_shard: Callable[[int, int], None] | None,
) -> int:
    part_of = {key: part for part in merge.parts for key in part.outputs}
    resumed = 0
    for number, (name, keys) in enumerate(shards.items(), start=1):
        if folder.has(name):
            resumed += 1
        else:
            layout = {key: part_of[key].outputs[key] for key in keys}
            folder.write(name, layout, _merged(merge, checkpoint, part_of, keys))
        if on_shard is not None:
            on_shard(number, len(shards))
    return resumed


def _merged(
    merge: Merge, checkpoint: Checkpoint, part_of: Mapping[str, Part], keys: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """The merged weights `keys`. Those of one part are in memory at a time, and the pages that they are read from."""
    waiting = set(keys)
    for key in keys:
        if key in waiting:
            with Reader(checkpoint) as read:
                values = merge.compute(part_of[key], read)
            yield from ((own, values[own]) for own in values if own in waiting)
            waiting -= values.keys()
            del values


def _copy_other_files(base: Path, tokenizer: Path | None, to: Path) -> None:
    for path in base.iterdir():
        if path.is_file() and path.name != "config.json" and not any(map(path.match, _NOT_COPIED)):
            shutil.copyfile(path, to / path.name)
    if tokenizer is None or not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        return
    for name in TOKENIZER_FILES:
        (to / name).unlink(missing_ok=True)  # a file that only the base model's tokenizer has would change the other
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, to / name)


def _copy_generation_config(adapter: Path, to: Path) -> None:
    """Replace that of the base model with the one of the adapter, which ends replies at the end of a turn."""
    if (adapter / GENERATION_CONFIG).is_file():
        shutil.copyfile(adapter / GENERATION_CONFIG, to / GENERATION_CONFIG)


def _write_config(config: Any, adapter: Adapter, merge: Merge, to: Path) -> None:
    if merge.unties:
        config.tie_word_embeddings = False
    config.get_text_config().vocab_size = adapter.vocab_size
    write_text(to / "config.json", json.dumps(json.loads(config.to_json_string()), indent=2) + "\n")
