"""Reading the safetensors checkpoint of a model without loading it: names, shapes, dtypes, and single weights."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ebft.data.locate import lasting_name, locate
from ebft.errors import ModelError
from ebft.fetch.catalog import is_gguf

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CONVERT = (
    "Load it once with from_pretrained, write it with save_pretrained (which writes safetensors), and use that folder."
)


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a model in a folder: for each file, its weights on the meta device, in the order of the file."""

    folder: Path
    files: dict[str, dict[str, Tensor]]

    @classmethod
    def of(cls, folder: Path) -> Checkpoint:
        """Read the headers of the checkpoint in `folder`. Raises ModelError if it is not in safetensors format."""
        names = _file_names(folder)
        files = {name: read_header(folder / name) for name in names}
        if (folder / INDEX).is_file():
            _check_index(folder, files)
        return cls(folder, files)

    @property
    def weights(self) -> dict[str, Tensor]:
        """All weights by name, on the meta device."""
        return {key: weight for weights in self.files.values() for key, weight in weights.items()}

    def file_of(self) -> dict[str, str]:
        """The file of each weight."""
        return {key: name for name, weights in self.files.items() for key in weights}


class Reader:
    """Reads single weights; a context manager that closes the files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder, self._file_of = checkpoint.folder, checkpoint.file_of()
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def __call__(self, key: str) -> Tensor:
        name = self._file_of[key]
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._open[name].get_tensor(key)


def read_header(path: Path) -> dict[str, Tensor]:
    """The weights in a safetensors file, on the meta device. Raises ModelError if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file, torch.device("meta"):
            # The dtype of an empty slice: safetensors has names of its own for dtypes.
            return {key: _meta(file, key) for key in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error


def _meta(file: Any, key: str) -> Tensor:
    view = file.get_slice(key)
    shape = view.get_shape()
    dtype = (view[:0] if shape else file.get_tensor(key)).dtype
    return torch.empty(shape, dtype=dtype, device="meta")


def base_folder(name: str, revision: str | None = None) -> Path:
    """The folder of the model `name` (a folder, a fetched model or a Hub id), without downloading pickled weights."""
    if is_gguf(name):
        raise ModelError(
            f"{name} is a GGUF file, but weights are merged in safetensors format. Convert it once with "
            f"`ebft fetch {name} --output DIR`, and merge with --base-model DIR."
        )
    if locate(name, "model", "base_model") is not None:
        return Path(lasting_name(name))
    try:
        return Path(
            snapshot_download(name, revision=revision, ignore_patterns=[*PICKLED, "*.gguf", "*.msgpack", "*.h5"])
        )
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(f"base_model: {name!r} cannot be downloaded from the Hub: {error}") from error


def _file_names(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX} cannot be read: {error!r}") from error
    if (folder / SINGLE).is_file():
        return [SINGLE]
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder} has its weights in {pickled[0]}, a pickle file, which is never read because loading one can run "
            f"any code. {_CONVERT}"
        )
    raise ModelError(f"{folder} contains no weights ({SINGLE} or {INDEX}).")


def _check_index(folder: Path, files: dict[str, dict[str, Tensor]]) -> None:
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    for key, name in weight_map.items():
        if key not in files[name]:
            raise ModelError(f"{folder / name} has no weight {key}, but {INDEX} lists it. Download the model again.")
