"""Reading the safetensors checkpoint of a model without loading it: names, shapes, dtypes, and single weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from ebft.data.locate import lasting_name, locate
from ebft.errors import ModelError
from ebft.fetch.catalog import is_gguf
from ebft.models.weights import INDEX, SINGLE, read_header, refuse_pickles, weight_files

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a model in a folder: for each file, its weights on the meta device, in the order of the file."""

    folder: Path
    files: dict[str, dict[str, Tensor]]

    @classmethod
    def of(cls, folder: Path) -> Checkpoint:
        """Read the headers of the checkpoint in `folder`. Raises ModelError if it is not in safetensors format."""
        refuse_pickles(folder)
        files = weight_files(folder)
        if not files:
            raise ModelError(f"{folder} contains no weights ({SINGLE} or {INDEX}).")
        return cls(folder, {str(file.relative_to(folder)): read_header(file) for file in files})

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
