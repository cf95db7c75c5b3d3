"""Writing a checkpoint in shards that can be resumed: finished shards are recorded with their checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from ebft.errors import ModelError
from ebft.export.stream import write_tensors
from ebft.models.weights import INDEX, SINGLE

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
        elif present:
            raise ModelError(f"{folder} is not empty. Remove it, or choose another folder with --output.")
        else:
            self._record()

    def has(self, name: str) -> bool:
        """Whether a shard is complete, which is verified by its checksum."""
        path = self.folder / name
        return name in self._finished and path.is_file() and checksum(path) == self._finished[name]

    def write(self, name: str, layout: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write a shard with the weights of `layout` (`write_tensors`), and record it."""
        temporary = self.folder / f"{name}.tmp"
        write_tensors(temporary, layout, weights)
        self._finished[name] = checksum(temporary)
        _publish(temporary, self.folder / name)
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


def write_text(path: Path, text: str) -> None:
    """Write a file such that it is either complete or not there."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    _publish(temporary, path)


def write_index(folder: Path, shards: Mapping[str, Iterable[str]], total_size: int) -> None:
    """Write the index of a checkpoint of several shards, which transformers finds them by."""
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(folder / INDEX, json.dumps(content, indent=2) + "\n")


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _publish(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
