"""Reading a checkpoint without loading it, and writing one shard by shard, weight by weight."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor

from ebft.catalog import is_gguf, lasting_name, locate
from ebft.errors import ModelError
from ebft.files import MODEL_WEIGHTS, file_hash, first_weights, publish, write_text
from ebft.models.weight_files import WeightFiles, weight_files
from ebft.transformers_internals import convert_moe_packed_tensors

SINGLE = MODEL_WEIGHTS[0]
INDEX = f"{SINGLE}.index.json"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.msgpack", "*.h5")  # of weights
_BLOCKS, _SCALES = "_blocks", "_scales"  # endings of names of weights in MXFP4


class DequantisedFiles(WeightFiles):
    """Weights of which those that are stored in MXFP4 are read in bfloat16, which can represent all of their values."""

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__(paths)
        stored = self.weights
        names = {key.removesuffix(_BLOCKS) for key in stored if key.endswith(_BLOCKS)}
        self._packed = {name for name in names if name + _SCALES in stored}
        scales = {name + _SCALES for name in self._packed}
        for path, weights in self.files.items():
            self.files[path] = dict(self._plain(*item) for item in weights.items() if item[0] not in scales)

    def read(self, key: str) -> Tensor:
        """A weight; its file stays open."""
        if key not in self._packed:
            return super().read(key)
        return convert_moe_packed_tensors(super().read(key + _BLOCKS), super().read(key + _SCALES))

    def _plain(self, key: str, weight: Tensor) -> tuple[str, Tensor]:
        name = key.removesuffix(_BLOCKS)
        if name not in self._packed:
            return key, weight
        experts, outputs, *blocks = weight.shape  # a byte has two values
        inputs = 2 * math.prod(blocks)
        return name, torch.empty(experts, inputs, outputs, dtype=torch.bfloat16, device="meta")


def read_checkpoint(folder: Path, kind: type[WeightFiles] = WeightFiles) -> WeightFiles:
    """The weights of the model in a folder. Raises ModelError if there are none."""
    files = weight_files(folder)
    if not files:
        raise ModelError(f"{folder} contains no weights ({' or '.join(MODEL_WEIGHTS)}, or their index).")
    return kind(files)


def base_folder(name: str, revision: str | None = None) -> Path:
    """The folder of the model `name` (a folder, a fetched model or a Hub id)."""
    if is_gguf(name):
        raise ModelError(
            f"{name} is a GGUF file, but weights are merged in safetensors format. Convert it once with "
            f"`ebft fetch {name} --output DIR`, and merge with --base-model DIR."
        )
    if locate(name, "model", "base_model") is not None:
        return Path(lasting_name(name))
    try:
        folder = Path(snapshot_download(name, revision=revision, ignore_patterns=[*OTHER_FORMATS]))
        if first_weights(folder, MODEL_WEIGHTS[:1]) is None:
            snapshot_download(name, revision=revision, allow_patterns=["pytorch_model*.bin"])
        return folder
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(f"base_model: {name!r} cannot be downloaded from the Hub: {error}") from error


def check_free(to: Path) -> None:
    """Raise ModelError unless `to` is an empty folder, or does not exist."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ModelError(f"{to} is not empty. Remove it, or choose another folder with --output.")


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Context manager with a folder that is moved to `to` at the end, and deleted if there is an error."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(mkdtemp(prefix=f"{to.name}.", dir=to.parent))
    except OSError as error:
        raise ModelError(f"{to} cannot be created ({error.strerror}). Choose another folder with --output.") from error
    try:
        staged = temporary / to.name
        staged.mkdir()
        yield staged
        if to.exists():
            to.rmdir()
        publish(staged, to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


PROGRESS = "merge_progress.json"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class ShardFolder:
    """A folder that a checkpoint is written to, shard by shard.

    `identity` describes everything that the result depends on. If the folder contains an unfinished checkpoint of the
    same identity, its finished shards are kept. Raises ModelError if it contains anything else.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object]) -> None:
        self.folder = folder
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._finished: dict[str, str] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            present = [path.name for path in folder.iterdir()]
        except OSError as error:
            raise ModelError(f"{folder} cannot be created ({error.strerror}). Choose another folder.") from error
        if PROGRESS in present:
            self._finished = self._recorded()
            for temporary in folder.glob("*.tmp"):
                temporary.unlink()
        else:
            check_free(folder)
            self._record()

    def has(self, name: str) -> bool:
        """Whether a shard is complete, which is verified by its checksum."""
        path = self.folder / name
        return name in self._finished and path.is_file() and file_hash(path) == self._finished[name]

    def write(self, name: str, layout: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write a shard with the weights of `layout` (`write_tensors`), and record it."""
        temporary = self.folder / f"{name}.tmp"
        write_tensors(temporary, layout, weights)
        self._finished[name] = file_hash(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / name)
        self._record()

    def finish(self) -> None:
        """Remove the record: the checkpoint is complete."""
        (self.folder / PROGRESS).unlink()

    def _recorded(self) -> dict[str, str]:
        try:
            record = json.loads((self.folder / PROGRESS).read_text(encoding="utf-8"))
            identity, shards = record["identity"], dict(record["shards"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{self.folder / PROGRESS} cannot be read ({error!r}). Remove {self.folder}.") from error
        if identity != self._identity:
            raise ModelError(
                f"{self.folder} contains an unfinished merge of another adapter, base model or shard size. Remove it, "
                "or choose another folder with --output."
            )
        return shards

    def _record(self) -> None:
        write_text(self.folder / PROGRESS, json.dumps({"identity": self._identity, "shards": self._finished}, indent=2))


def write_index(folder: Path, shards: Mapping[str, Iterable[str]], total_size: int) -> None:
    """Write the index of a checkpoint of several shards, which transformers finds them by."""
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(folder / INDEX, json.dumps(content, indent=2) + "\n")


def split(weights: Mapping[str, Tensor], max_size: int) -> Iterator[list[str]]:
    """Divide weights, in order, into shards of at most `max_size` bytes; a larger weight has its own shard."""
    shard, size = [], 0
    for key, weight in weights.items():
        if shard and size + weight.nbytes > max_size:
            yield shard
            shard, size = [], 0
        shard.append(key)
        size += weight.nbytes
    if shard:
        yield shard


def shard_names(count: int) -> list[str]:
    """The file names of `count` shards, as transformers names them."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def parse_size(text: str) -> int:
    """The number of bytes of a size such as 5GB or 500MiB. Raises ModelError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", text.strip().upper())
    unit = match and (match[2] if match[2].endswith("B") or not match[2] else f"{match[2]}B")
    if not match or unit not in _UNITS or not (size := int(float(match[1]) * _UNITS[unit])):
        raise ModelError(f"--max-shard-size: invalid value {text!r}; expected a size such as 5GB or 500MB.")
    return size


_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, layout: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a file with the tensors of `layout`, which may be on the meta device, by their names.

    `tensors` yields the same names once each, in any order, with values of the same dtype and shape.
    Raises ModelError if it does not, or if safetensors has no name for a dtype.
    """
    # Wide dtypes first, so that each tensor is aligned, as safetensors does it.
    names = sorted(layout, key=lambda name: (-layout[name].itemsize, name))
    places, end = {}, 0
    for name in names:
        places[name] = (end, end := end + layout[name].nbytes)
    entries = {name: _entry(name, layout[name], places[name]) for name in names}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    header = text + b" " * (-len(text) % 8)
    written = set()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        for name, tensor in tensors:
            expected = layout.get(name)
            if expected is None or name in written:
                raise ModelError(f"{path}: {name} is not a weight of this file, or is written twice.")
            if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
                raise ModelError(
                    f"{path}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected {expected.dtype} of "
                    f"shape {tuple(expected.shape)}."
                )
            file.seek(start + places[name][0])
            file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))
            written.add(name)
        if missing := layout.keys() - written:
            raise ModelError(f"{path}: weights are missing: {', '.join(sorted(missing)[:3])}")


def _entry(name: str, tensor: Tensor, place: tuple[int, int]) -> dict[str, object]:
    if tensor.dtype not in _NAMES:
        raise ModelError(f"{name} has the dtype {tensor.dtype}, which cannot be written in safetensors format.")
    return {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": list(place)}
