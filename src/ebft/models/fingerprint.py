"""Short descriptions of the files of a model, by which a resumed run notices that they have changed.

They do not depend on the folder or on how weights are divided into files. Of large weights, a sample is read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ebft.data.locate import lasting_name
from ebft.files import json_object

_ALL = 2**26  # bytes; weights and files up to this size are read as a whole
_BLOCK = 2**14  # bytes read of each tensor of larger weights
_TENSORS = 4096  # at most this many of their tensors are sampled
_BLOCKS = 1024  # of larger files that are not safetensors
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
# Entries of JSON files about the place or the program that saved them, and the template, which is compared separately.
_LEFT_OUT = ("name_or_path", "is_local", "local_files_only", "transformers_version", "chat_template")


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of the model `name`; for a Hub id, its folder in the cache. None if there is none."""
    folder = Path(lasting_name(name))
    if folder.is_dir():
        return folder
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a Hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def weights_fingerprint(folder: Path, gguf_file: str | None = None) -> str | None:
    """The tensors of the model or the adapter in `folder`: their names, types and shapes, and a sample of each.

    None if there are no weights, or if they cannot be read, which is reported where they are loaded.
    """
    try:
        if gguf_file is not None:
            return file_sample(folder / gguf_file)
        files = _weight_files(folder)
        if files and files[0].suffix == ".safetensors":
            return _of_tensors(files)
        return _hash([file_sample(path) for path in files]) if files else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None


def tokenizer_fingerprints(folder: Path) -> dict[str, str]:
    """The hash of each file of the tokenizer in `folder`; of JSON files, that of their contents."""
    paths = {path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    return {path.name: _of_file(path) for path in sorted(paths)}


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    """The contents of a JSON file of settings such as config.json, without those that do not affect the model."""
    try:
        values = json_object(folder / name)
    except (OSError, ValueError):  # reported where it is loaded
        return {}
    return {key: value for key, value in values.items() if not key.startswith("_") and key not in _LEFT_OUT}


def file_sample(path: Path) -> str:
    """The hash of a file's size and contents; of more than 64 MiB, of 1,024 evenly spaced blocks."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _ALL:
            found.update(file.read())
        else:
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK) * block // (_BLOCKS - 1))
                found.update(file.read(_BLOCK))
    return found.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers or PEFT load from a folder."""
    for name in ("adapter_model.safetensors", "model.safetensors", "pytorch_model.bin", "adapter_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return [folder / file for file in sorted(set(json_object(index)["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _of_tensors(files: list[Path]) -> str:
    tensors = sorted((name, *rest) for path in files for name, *rest in _tensors(path))
    reads_all = sum(end - start for *_, start, end in tensors) <= _ALL
    every = 1 if reads_all else -(-len(tensors) // _TENSORS)
    found = hashlib.sha256()
    for place, (name, dtype, shape, path, start, end) in enumerate(tensors):
        found.update(json.dumps([name, dtype, shape]).encode())
        if place % every:
            continue
        length = end - start if reads_all else min(end - start, _BLOCK)
        with path.open("rb") as file:
            file.seek(start + (end - start - length) // 2)
            found.update(file.read(length))
    return found.hexdigest()


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int], Path, int, int]]:
    """Name, dtype, shape, file, start and end of each tensor of a safetensors file."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        if length > path.stat().st_size:
            raise ValueError("truncated")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, entry["dtype"], entry["shape"], path, 8 + length + start, 8 + length + end


def _of_file(path: Path) -> str:
    try:
        if path.suffix == ".json":
            return _hash(settings_of(path.parent, path.name))
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # reported where it is loaded
        return ""


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
