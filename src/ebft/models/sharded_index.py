"""The index of a folder of torch.distributed.checkpoint, as FSDP2 saves it, read without running code."""

from __future__ import annotations

import pickle
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

WEIGHTS, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"  # folders in a checkpoint, as accelerate names them
INDEX = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        *("Size", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32"),
        *("int16", "int8", "uint8", "bool", "strided"),
    },
    **dict.fromkeys(
        ("pathlib", Path.__module__),  # another one since Python 3.13
        {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    ),
    "collections": {"OrderedDict"},
}


class ShardedReader(FileSystemReader):
    """Reads such a folder; its index without running code. Raises ValueError for an index with other classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_index(folder: Path) -> Metadata:
    """The index of such a folder. Raises OSError if there is none, and ValueError if it cannot be read."""
    try:
        with (folder / INDEX).open("rb") as file:
            found = _Unpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise errors of any type, such as MemoryError
        raise ValueError(f"the index cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError("it is not an index of torch.distributed.checkpoint")
    return found


def check_chunks(index: Metadata) -> None:
    """Raise ValueError if the chunks of a tensor do not cover it, or if one is not in any file."""
    stored = {(part.fqn, tuple(part.offset)) for part in index.storage_data if part.offset is not None}
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        covered = sum(prod(chunk.sizes) for chunk in entry.chunks)
        missing = [chunk for chunk in entry.chunks if prod(chunk.sizes) and (name, tuple(chunk.offsets)) not in stored]
        if covered != prod(entry.size) or missing:
            raise ValueError(f"parts of {name} are missing in the index")


def check_files(folder: Path) -> None:
    """Raise ValueError if a file of such a folder is missing or too short, by its index; OSError if it has no index."""
    index = read_index(folder)
    try:
        check_chunks(index)
        needed = _needed(index)
    except (AttributeError, TypeError, OverflowError, RuntimeError) as error:  # values of other types
        raise ValueError(f"the index is damaged ({error})") from error
    for name, length in sorted(needed.items()):
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        size = (folder / name).stat().st_size
        if size < length:
            raise ValueError(f"{name} has {size} bytes instead of at least {length}")


def _needed(index: Metadata) -> dict[str, int]:
    """The files of a folder, and the bytes that each has at least."""
    needed: dict[str, int] = {}
    for part in index.storage_data.values():
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    return needed


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")
        return super().find_class(module, name)
