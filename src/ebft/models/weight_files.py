"""Files of weights: which of a folder are read, and single weights of them, without running code.

safetensors and what torch.save writes (`.bin`, with weights_only=True) are read alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ebft.errors import ModelError, cause, some_of
from ebft.files import ADAPTER_WEIGHTS, MODEL_WEIGHTS, first_weights, indexed_files
from ebft.models.files import read_object
from ebft.models.sharded_index import WEIGHTS as PARTS

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads from a folder; none if there are none, or `folder` is a Hub id.

    Raises ModelError for an index that cannot be used, for files that are missing, and for other formats.
    """
    path, again = first_weights(folder, MODEL_WEIGHTS), "Copy or download it again"
    if path is None:
        refuse_other_formats(folder)
        return []
    if path.suffix != ".json":
        return [path]
    if not isinstance(metadata := read_object(path, again).get("metadata"), dict):
        raise ModelError(f"{path}: metadata: invalid value {metadata!r:.60}; expected an object. {again}")
    try:
        files = indexed_files(path)
    except ValueError as error:
        raise ModelError(f"{path}: {error}. {again}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{path} names {some_of(missing)}, which {'is' if len(missing) == 1 else 'are'} not in the folder. Copy or "
            "download the missing files"
        )
    return files


def adapter_file(folder: Path) -> Path:
    """The file of the weights of the adapter in a folder. Raises ModelError if there is none."""
    path = first_weights(folder, ADAPTER_WEIGHTS)
    if path is None:
        refuse_other_formats(folder)
        raise ModelError(f"{folder} has no {ADAPTER_WEIGHTS[0]}. Give the folder of a completely saved adapter.")
    return path


class WeightFiles:
    """The weights in files, of which single ones are read while it is open as a context manager.

    `files`: for each file, its weights on the meta device, in the order of the file. Raises ModelError for a file that
    is truncated, or contains more than tensors.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        paths = list(paths)
        # PyTorch reads these, as it saved them before 1.6, only as a whole.
        self._whole = {path: _unpickled(path) for path in paths if _is_pickle(path) and not is_zipfile(path)}
        self.files = {path: _header(path, self._whole.get(path)) for path in paths}
        self._path_of = {key: path for path, weights in self.files.items() for key in weights}
        self._open: dict[Path, Callable[[str], Tensor]] = {}
        self._stack = ExitStack()

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
            if _is_pickle(path):
                self._open[path] = (self._whole.get(path) or _unpickled(path)).__getitem__
            else:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt")).get_tensor
        return self._open[path](key)


def _is_pickle(path: Path) -> bool:
    return path.suffix == ".bin"


def _header(path: Path, loaded: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The weights in a file, on the meta device, in the order of the file."""
    if _is_pickle(path):
        weights = _unpickled(path) if loaded is None else loaded
        return {key: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for key, weight in weights.items()}
    try:
        with safe_open(path, framework="pt") as file, torch.device("meta"):
            dtypes: dict[str, torch.dtype] = {}
            return {key: _meta(file, key, dtypes) for key in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} is truncated or not a safetensors file ({cause(error)}). Copy or download it again"
        ) from error


def _meta(file: Any, key: str, dtypes: dict[str, torch.dtype]) -> Tensor:
    view = file.get_slice(key)
    shape, name = view.get_shape(), view.get_dtype()
    if name not in dtypes:  # that of an empty slice: safetensors has names of its own for dtypes
        dtypes[name] = (view[:0] if shape else file.get_tensor(key)).dtype
    return torch.empty(shape, dtype=dtypes[name], device="meta")


_TRUSTED = (
    "If you trust its source, load it in Python with weights_only=False, and save the model with "
    "save_pretrained(FOLDER), which writes safetensors"
)


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors in a file of torch.save, which are mapped into memory if it is not an old one."""
    try:
        found = torch.load(str(path), "cpu", mmap=is_zipfile(path), weights_only=True)
    except Exception as error:  # damaged pickles raise errors of any type, such as MemoryError
        other = other_content(error)
        if other is not None:
            raise ModelError(f"{path} {other}") from error
        raise ModelError(f"{path} is truncated or not a file of torch.save. Copy or download it again") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(f"{path} does not contain tensors by name. {_TRUSTED}")
    for key, value in found.items():
        if not isinstance(key, str):
            raise ModelError(f"{path} has a tensor named {key!r:.60}, but names are text. Save it again by names")
        if value.is_meta or value.is_quantized or value.layout is not torch.strided:
            kind = "on the meta device, without values" if value.is_meta else "sparse" if value.is_sparse else "packed"
            raise ModelError(
                f"{path} has {key} as a tensor that is {kind}, but weights are plain tensors. Save the model with "
                "save_pretrained(FOLDER) after it is loaded completely"
            )
    return {key: value.detach() for key, value in found.items()}


def other_content(error: Exception) -> str | None:
    """What to say of a file with more than tensors, if this is an error of torch.load for one."""
    found = (
        re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error)) if isinstance(error, UnpicklingError) else None
    )
    if found is None:
        return None
    return f"contains {found[1]}, which may run code when it is loaded, so it is not read. {_TRUSTED}"


def refuse_other_formats(folder: Path) -> None:
    """Raise ModelError for a folder whose weights are in other files than those that transformers and PEFT read."""
    if not folder.is_dir() or first_weights(folder, (*MODEL_WEIGHTS, *ADAPTER_WEIGHTS)) is not None:
        return
    if (folder / PARTS).is_dir():
        raise ModelError(
            f"{folder} is a checkpoint that FSDP2 has saved in parts. Run `ebft merge-sharded {folder}`, and use the "
            "folder that it prints"
        )
    found = pickles(folder)
    if found:
        raise ModelError(
            f"{some_of(found)} in {folder} is none of the files that weights are read from: "
            f"{', '.join((*MODEL_WEIGHTS, *ADAPTER_WEIGHTS))}. {_TRUSTED}"
        )


def pickles(folder: Path) -> list[str]:
    """The names of the files in a folder that may be weights in a pickle."""
    other = ("training_args.bin", "optimizer.pt", "scheduler.pt")
    found = (path.name for pattern in _PICKLES for path in folder.glob(pattern))
    return sorted(name for name in found if name not in other and not name.startswith("rng_state"))
