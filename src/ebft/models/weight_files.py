"""Files of models: the weights that are read, one by one, without running code; and what kind of model they are.

safetensors and what torch.save writes (`.bin`, with weights_only=True) are read alike, and the index of a folder of
torch.distributed.checkpoint, as FSDP2 saves it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ebft.errors import ModelError, doing
from ebft.files import ADAPTER_WEIGHTS, MODEL_WEIGHTS, first_weights, indexed_files

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads from a folder; none if there are none, or `folder` is a Hub id."""
    path = first_weights(folder, MODEL_WEIGHTS)
    if path is None:
        refuse_parts(folder)
        return []
    with doing(f"reading {path}"):
        return [path] if path.suffix != ".json" else indexed_files(path)


def adapter_file(folder: Path) -> Path:
    """The file of the weights of the adapter in a folder. Raises ModelError if there is none."""
    path = first_weights(folder, ADAPTER_WEIGHTS)
    if path is None:
        refuse_parts(folder)
        raise ModelError(f"{folder} has no {ADAPTER_WEIGHTS[0]}. Give the folder of a completely saved adapter.")
    return path


class WeightFiles:
    """The weights in files; single ones are read while it is open as a context manager. `files`: for each file, its
    weights on the meta device, in the order of the file."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.files: dict[Path, dict[str, Tensor]] = {}
        self._open: dict[Path, Any] = {}  # pickles are read at once, or mapped if PyTorch 1.6 or a later one saved them
        self._stack = ExitStack()
        for path in paths:
            with doing(f"reading {path}"):
                if path.suffix == ".bin":
                    self._open[path] = _unpickled(path)
                    like = lambda weight: torch.empty_like(weight, device="meta")
                    self.files[path] = {key: like(weight) for key, weight in self._open[path].items()}
                    continue
                with safe_open(path, framework="pt") as file:
                    self.files[path] = _on_meta(file)
        self._path_of = {key: path for path, weights in self.files.items() for key in weights}

    @property
    def weights(self) -> dict[str, Tensor]:
        """All weights by name, on the meta device."""
        return {key: weight for weights in self.files.values() for key, weight in weights.items()}

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, key: str) -> Tensor:
        """A weight; its file stays open."""
        path = self._path_of[key]
        if path not in self._open:
            is_pickle = path.suffix == ".bin"
            self._open[path] = _unpickled(path) if is_pickle else self._stack.enter_context(safe_open(path, "pt"))
        file = self._open[path]
        return file[key].detach() if isinstance(file, dict) else file.get_tensor(key)


def _on_meta(file: Any) -> dict[str, Tensor]:
    """The weights in an open file, on the meta device, in the order of the file."""
    found, dtypes = {}, dict[str, torch.dtype]()
    for key in file.offset_keys():
        view = file.get_slice(key)
        shape, name = view.get_shape(), view.get_dtype()
        if name not in dtypes:  # the dtype of an empty slice: safetensors has names of its own for dtypes
            dtypes[name] = (view[:0] if shape else file.get_tensor(key)).dtype
        found[key] = torch.empty(shape, dtype=dtypes[name], device="meta")
    return found


def _unpickled(path: Path) -> dict[str, Tensor]:
    return dict(torch.load(str(path), "cpu", mmap=is_zipfile(path), weights_only=True))


def refuse_parts(folder: Path) -> None:
    """Raise ModelError for a checkpoint that FSDP2 has saved in parts, without other weights."""
    if (folder / WEIGHTS).is_dir() and first_weights(folder, (*MODEL_WEIGHTS, *ADAPTER_WEIGHTS)) is None:
        raise ModelError(f"FSDP2 saved {folder} in parts. Run `ebft merge-sharded {folder}`, and use its result")


def pickles(folder: Path) -> list[str]:
    """The names of the files in a folder that may be weights in a pickle."""
    other = ("training_args.bin", "optimizer.pt", "scheduler.pt")
    found = (path.name for pattern in _PICKLES for path in folder.glob(pattern))
    return sorted(name for name in found if name not in other and not name.startswith("rng_state"))


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
    """Reads such a folder; its index without running code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_index(folder: Path) -> Metadata:
    """The index of such a folder. Raises UnpicklingError for an index with other classes."""
    with doing(f"reading {folder / INDEX}"), (folder / INDEX).open("rb") as file:
        return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")
        return super().find_class(module, name)
