"""Turning a checkpoint that FSDP2 has saved in parts into a folder for `from_pretrained`."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from ebft.errors import ModelError, doing
from ebft.files import ADAPTER_CONFIG, CHECKSUMS, checksum, json_object
from ebft.models.pretrained import find_model, pretrained_config, pretrained_tokenizer
from ebft.models.weight_files import INDEX, WEIGHTS, ShardedReader, read_index
from ebft.run_files import RECORDS
from ebft.tools.export.adapter import empty_model
from ebft.tools.export.checkpoint import check_empty, new_folder

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
    described, is_adapter = ((checkpoint / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    weights = _read(parts)
    with new_folder(to) as staged:
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
        sums = parts.parent / CHECKSUMS
        for name, value in (json_object(sums) if sums.is_file() else {}).items():
            if name.startswith(f"{parts.name}/") and checksum(parts.parent / name) != value:
                raise ModelError(f"{parts.parent / name} is damaged (wrong checksum).")
        index = read_index(parts).state_dict_metadata
        tensors = {name: entry for name, entry in index.items() if isinstance(entry, TensorStorageMetadata)}
        weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in tensors.items()}
        try:
            load(weights, storage_reader=ShardedReader(parts), no_dist=True)
        except CheckpointException as error:  # which is no Exception
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
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
