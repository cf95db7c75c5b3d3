"""Turning a checkpoint that FSDP2 has saved in parts into a folder for `from_pretrained`."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from ebft.errors import ModelError, SaveError, cause
from ebft.files import ADAPTER_CONFIG as _ADAPTER
from ebft.files import CHECKSUMS, checksum, json_object
from ebft.models.pretrained import find_model, pretrained_config, pretrained_tokenizer
from ebft.models.sharded_index import INDEX, WEIGHTS, ShardedReader, check_files, read_index
from ebft.run_files import RECORDS
from ebft.tools.export.adapter import empty_model
from ebft.tools.export.checkpoint import check_free, new_folder, parse_size

_TEXTS = (".json", ".jinja", ".model", ".txt", ".md")
_NAMES = ("config.json", _ADAPTER)


@dataclass(frozen=True)
class Merged:
    """The folder of the merged model, and the number and size of its weights."""

    folder: Path
    weights: int
    bytes: int
    is_adapter: bool


def merge_sharded(folder: Path, to: Path | None = None, base: str | None = None, shard_size: str = "50GB") -> Merged:
    """Write the model or adapter of a checkpoint in parts to `to` (default: `merged` in it), and return what it has.

    `base` names the model whose config and tokenizer are used if the checkpoint has none, as those of other programs.
    The whole model must fit in memory. Raises ModelError for incomplete checkpoints and for a folder that is in use,
    SaveError if the files cannot be written.
    """
    limit = parse_size(shard_size)
    parts = _find_parts(folder)
    checkpoint = parts.parent
    to = to or checkpoint / "merged"
    if to.is_symlink():
        raise ModelError(f"{to} is a symbolic link. Remove it, or choose another folder with --output.")
    check_free(to)
    _check_complete(parts)
    described = any((checkpoint / name).is_file() for name in _NAMES)
    if not described and base is None:
        raise ModelError(
            f"{checkpoint} has neither config.json nor {_ADAPTER}. Name the model that was trained: --base-model MODEL"
        )
    weights = _read(parts)
    is_adapter = (checkpoint / _ADAPTER).is_file()
    try:
        with new_folder(to) as staged:
            if is_adapter:
                save_file(weights, staged / "adapter_model.safetensors", {"format": "pt"})
            else:
                source = str(checkpoint) if described else find_model(str(base), "--base-model")
                _model(source, weights).save_pretrained(staged, max_shard_size=limit)
                if not described:
                    pretrained_tokenizer(source).save_pretrained(staged)
            for path in sorted(checkpoint.iterdir()):
                if path.is_file() and path.suffix in _TEXTS and not any(map(path.match, RECORDS)):
                    shutil.copy2(path, staged / path.name)
    except (OSError, SafetensorError) as error:
        raise SaveError.of(to, error) from error
    return Merged(to, len(weights), sum(weight.nbytes for weight in weights.values()), is_adapter)


def _find_parts(folder: Path) -> Path:
    """The folder of the parts of a checkpoint: in `folder`, or `folder` itself."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder. Give a checkpoint that was saved in parts.")
    if (folder / WEIGHTS).is_dir():
        return folder / WEIGHTS
    if (folder / INDEX).is_file():
        return folder
    inside = sorted(path.parent.name for path in folder.glob(f"checkpoint-*/{WEIGHTS}"))
    if inside:
        raise ModelError(f"{folder} has checkpoints in parts: {', '.join(inside)}. Give one of them.")
    if any(folder.glob("global_step*")):
        raise ModelError(
            f"{folder} is a checkpoint of DeepSpeed, not of FSDP2. DeepSpeed has put a script into it: python "
            f"{folder / 'zero_to_fp32.py'} {folder} OUTPUT_DIR --safe_serialization"
        )
    if any(folder.glob("*model*.safetensors")):
        raise ModelError(f"{folder} has its weights in safetensors files already. There is nothing to merge.")
    raise ModelError(f"{folder} has no folder {WEIGHTS}, which checkpoints of FSDP2 in parts have.")


def _check_complete(parts: Path) -> None:
    try:
        check_files(parts)
    except FileNotFoundError:
        raise ModelError(f"{parts} is incomplete: {INDEX} is missing.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{parts} is incomplete or damaged: {cause(error)}") from error
    sums = parts.parent / CHECKSUMS
    if not sums.is_file():
        return
    try:
        listed = json_object(sums)
    except (OSError, ValueError) as error:
        raise ModelError(f"{sums} is damaged: {cause(error)}") from error
    for name, value in listed.items():
        path = parts.parent / name
        if name.startswith(f"{parts.name}/") and (not path.is_file() or checksum(path) != value):
            raise ModelError(f"{path} is {'damaged (wrong checksum)' if path.is_file() else 'missing'}.")


def _read(parts: Path) -> dict[str, Tensor]:
    """The whole weights, by name."""
    index = read_index(parts).state_dict_metadata
    tensors = {name: entry for name, entry in index.items() if isinstance(entry, TensorStorageMetadata)}
    weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in tensors.items()}
    try:
        with warnings.catch_warnings(action="ignore"):  # that there is one process only, as intended
            load(weights, storage_reader=ShardedReader(parts), no_dist=True)
    except (Exception, CheckpointException) as error:  # which is no Exception; its message has tracebacks
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ModelError(f"{parts} cannot be read: {last}") from error
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


def _model(source: str, weights: dict[str, Tensor]) -> PreTrainedModel:
    """The model that the config of `source` describes, with these weights."""
    try:
        model = empty_model(pretrained_config(source))
    except Exception as error:  # of any type, for sizes such as -32
        raise ModelError(f"{source} does not describe a causal language model: {cause(error)}") from error
    expected = model.state_dict()
    other = sorted(expected.keys() ^ weights.keys())
    differs = [name for name in sorted(expected.keys() & weights.keys()) if expected[name].shape != weights[name].shape]
    if other or differs:
        raise ModelError(
            f"the weights do not fit the config of {source}: {(other + differs)[0]} is "
            f"{'missing' if other else 'of another shape'} in one of them."
        )
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    if any(not torch.equal(value, weights[name]) for name, value in model.state_dict().items()):
        model.load_state_dict(weights, assign=True)  # embeddings that differ, although the config ties them
    return model
