"""Reading a checkpoint without loading it, also one in parts of FSDP2, and writing one shard by shard."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import _TYPES, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from ebft import files
from ebft.catalog import is_gguf, lasting_name, locate
from ebft.errors import ModelError, doing
from ebft.models.pretrained import find_model, pretrained_config, pretrained_tokenizer
from ebft.models.sharding import load_parts
from ebft.models.weight_files import INDEX, WEIGHTS, WeightFiles, read_index, weight_files
from ebft.run_files import RECORDS
from ebft.tools.export.adapter import empty_model
from ebft.transformers_internals import convert_moe_packed_tensors

OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.msgpack", "*.h5")  # of weights
_BLOCKS, _SCALES = "_blocks", "_scales"  # endings of names of weights in MXFP4
_NAMES = {dtype: name for name, dtype in _TYPES.items()}  # of dtypes in safetensors


class DequantisedFiles(WeightFiles):
    """Weight files whose weights in MXFP4 are read in bfloat16, which represents all values exactly."""

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__(paths)
        stored = self.weights
        names = {key.removesuffix(_BLOCKS) for key in stored if key.endswith(_BLOCKS)}
        self._packed = {name for name in names if name + _SCALES in stored}
        scales = {name + _SCALES for name in self._packed}
        for path, weights in self.files.items():
            self.files[path] = {}
            for key, weight in weights.items():
                name = key.removesuffix(_BLOCKS)
                if name in self._packed:
                    experts, outputs, *blocks = weight.shape  # a byte has two values
                    shape = experts, 2 * math.prod(blocks), outputs
                    self.files[path][name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
                elif key not in scales:
                    self.files[path][key] = weight

    def read(self, key: str) -> Tensor:
        """A weight; its file stays open."""
        if key not in self._packed:
            return super().read(key)
        return convert_moe_packed_tensors(super().read(key + _BLOCKS), super().read(key + _SCALES))


def read_checkpoint(folder: Path, kind: type[WeightFiles] = WeightFiles) -> WeightFiles:
    """The weights of the model in a folder. Raises ModelError if there are none."""
    found = weight_files(folder)
    if not found:
        raise ModelError(f"{folder} contains no weights ({' or '.join(files.MODEL_WEIGHTS)}, or their index).")
    return kind(found)


def base_folder(name: str, revision: str | None = None) -> Path:
    """The folder of the model `name` (a folder, a fetched model or a Hub id)."""
    if is_gguf(name):
        raise ModelError(f"{name} is a GGUF file. Use --base-model DIR after: ebft fetch {name} --output DIR")
    if locate(name, "model", "base_model") is not None:
        return Path(lasting_name(name))
    with doing(f"downloading base_model: {name}"):
        folder = Path(snapshot_download(name, revision=revision, ignore_patterns=[*OTHER_FORMATS]))
        if files.first_weights(folder, files.MODEL_WEIGHTS[:1]) is None:
            snapshot_download(name, revision=revision, allow_patterns=["pytorch_model*.bin"])
        return folder


def check_empty(to: Path) -> None:
    """Raise ModelError unless `to` is an empty folder, or does not exist."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ModelError(f"{to} is not empty. Remove it, or choose another folder with --output.")


PROGRESS = "merge_progress.json"  # in a folder of shards until it is complete: what the shards depend on


def begin(folder: Path, identity: str) -> None:
    """Create a folder for shards, or continue an interrupted merge of the same `identity`. Raises ModelError."""
    record = folder / PROGRESS
    if not record.is_file() or record.read_text(encoding="utf-8") != identity:
        check_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(record, identity)


def write_tensors(path: Path, layout: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a safetensors file with the tensors of `layout`, which may be on the meta device, one at a time.

    safetensors itself writes only tensors that are all in memory. `tensors` yields the names of `layout` once each, in
    any order. The file has its name when it is complete, and on the disk.
    """
    entries, end = {}, 0
    # Wide dtypes first, so that each tensor is aligned, as safetensors does it.
    for name in sorted(layout, key=lambda name: (-layout[name].itemsize, name)):
        start, end = end, end + layout[name].nbytes
        entries[name] = {"dtype": _NAMES[layout[name].dtype], "shape": list(layout[name].shape)}
        entries[name]["data_offsets"] = [start, end]
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    header = text + b" " * (-len(text) % 8)
    left, temporary = dict(layout), path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors:
            expected = left.pop(name)
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
            file.seek(8 + len(header) + entries[name]["data_offsets"][0])
            file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))
        assert not left, sorted(left)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


_TEXTS = (".json", ".jinja", ".model", ".txt", ".md")


@dataclass(frozen=True)
class Merged:
    """The folder of the merged model, and the number and size of its weights."""

    folder: Path
    weights: int
    bytes: int
    is_adapter: bool


def merge_sharded(folder: Path, to: Path | None = None, base: str | None = None, shard_size: str = "50GB") -> Merged:
    """Write the model or adapter of a checkpoint in parts to `to` (default: `merged` in it), and return what it has.

    `base` names the model whose config and tokenizer are used if the checkpoint of another program has none.
    The whole model must fit in memory. Raises ModelError for folders without parts and for a folder that is in use.
    """
    parts = folder if (folder / INDEX).is_file() else folder / WEIGHTS
    checkpoint = parts.parent
    to = (to or checkpoint / "merged").resolve()  # the folder of a link is replaced, not the link
    check_empty(to)
    described, is_adapter = ((checkpoint / name).is_file() for name in ("config.json", files.ADAPTER_CONFIG))
    weights = _read(parts)
    with files.new_folder(to) as staged:
        if is_adapter:
            save_file(weights, staged / "adapter_model.safetensors", {"format": "pt"})
        else:
            source = str(checkpoint) if described else find_model(str(base), "--base-model")
            _model(source, weights).save_pretrained(staged, max_shard_size=shard_size)
            if not described:
                pretrained_tokenizer(source).save_pretrained(staged)
        for path in sorted(checkpoint.iterdir()):
            if path.is_file() and path.suffix in _TEXTS and not any(map(path.match, RECORDS)):
                shutil.copy2(path, staged / path.name)
    return Merged(to, len(weights), sum(weight.nbytes for weight in weights.values()), is_adapter)


def _read(parts: Path) -> dict[str, Tensor]:
    """The whole weights, by name."""
    with doing(f"reading {parts}"), warnings.catch_warnings(action="ignore"):  # that there is one process only
        sums = parts.parent / files.CHECKSUMS
        for name, value in (files.json_object(sums) if sums.is_file() else {}).items():
            if name.startswith(f"{parts.name}/") and files.checksum(parts.parent / name) != value:
                raise ModelError(f"{parts.parent / name} is damaged (wrong checksum).")
        index = read_index(parts).state_dict_metadata
        tensors = {name: entry for name, entry in index.items() if isinstance(entry, TensorStorageMetadata)}
        weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in tensors.items()}
        load_parts(weights, parts)
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


def _model(source: str, weights: dict[str, Tensor]) -> PreTrainedModel:
    """The model that the config of `source` describes, with these weights."""
    with doing(f"loading the weights into the model that {source} describes"):
        model = empty_model(pretrained_config(source))
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
    if any(not torch.equal(value, weights[name]) for name, value in model.state_dict().items()):
        model.load_state_dict(weights, assign=True)  # embeddings that differ, although the config ties them
    return model
