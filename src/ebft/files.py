"""Files: folders that are written completely or not at all, locks, hashes, and reading with errors for users.

A folder is written below `STAGING` of its parent, flushed to the disk, and then renamed, so that it is complete also if
the process is killed or the machine loses power.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ebft.errors import DataError, doing

STAGING = "_saving"  # incomplete and replaced folders in an output folder; deleted by the next save

CHECKSUMS = "ebft_checksums.json"  # in a checkpoint: {path of a binary file: CRC-32 of its contents}
RUN_FILE = "ebft_run.json"  # in a checkpoint or a final model: the settings and inputs of its run
STATE = "trainer_state.json"  # of a checkpoint or a final model, as transformers writes it
ADAPTER_CONFIG = "adapter_config.json"  # of an adapter, as PEFT writes it
_TEXTS = (".json", ".jinja", ".md", ".txt")  # may be edited


def clean_staging(parent: Path) -> None:
    """Delete what earlier saves left behind in `parent`."""
    shutil.rmtree(parent / STAGING, ignore_errors=True)


def remove_staged(staged: Path) -> None:
    """Delete a folder in a staging folder, or this itself, which remains only if it has what other saves left."""
    shutil.rmtree(staged, ignore_errors=True)
    if staged.parent.name == STAGING:
        with suppress(OSError):
            staged.parent.rmdir()


def check_writable(folder: Path) -> None:
    """Raise OSError if the files of an existing folder cannot be listed or created, tested by creating one."""
    os.listdir(folder)
    path = folder / f".ebft-{os.getpid()}"
    path.write_bytes(b"?")  # a full disk may have room for an empty file
    path.unlink()


def publish(staged: Path, folder: Path) -> None:
    """Move the complete folder `staged` to `folder`, replacing an existing one. Both must be on one file system."""
    allow_readers(staged)
    flush(staged)
    parked = _park(folder) if folder.exists() else None
    os.replace(staged, folder)
    _flush_one(folder.parent)
    if parked is not None:
        shutil.rmtree(parked, ignore_errors=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context manager with a folder that takes the place of `folder`, which is empty or does not exist, at the end.

    After an error, nothing is left; what a killed process has left is deleted by the next one.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    with doing(f"writing {folder}"):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            if folder.is_dir():  # which stays, since it may be the current folder of a shell
                publish_files(partial, folder)
            else:
                publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete a folder such that no part of it remains under its name if the deletion is interrupted."""
    shutil.rmtree(_park(folder), ignore_errors=True)


def _park(folder: Path) -> Path:
    """Move a folder to the staging folder, and return its new path."""
    parked = folder.parent / STAGING / f"{folder.name}.old"
    shutil.rmtree(parked, ignore_errors=True)
    parked.parent.mkdir(exist_ok=True)
    os.replace(folder, parked)
    return parked


def publish_files(staged: Path, folder: Path, obsolete: Iterable[Path] = ()) -> None:
    """Move the files of `staged` into the existing `folder` one by one, replacing files of the same name.

    The files `obsolete` of `folder` that `staged` does not replace are deleted first, so that they are never read
    together with the new ones.
    """
    allow_readers(staged)
    flush(staged)
    for path in obsolete:
        if not (staged / path.relative_to(folder)).is_file():
            path.unlink(missing_ok=True)
    for path in _files(staged):
        target = folder / path.relative_to(staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    _flush_one(folder)


def write_text(path: Path, text: str, is_flushed: bool = True) -> None:
    """Write a file such that readers find the old or the new content, never a part.

    `is_flushed`: also if the machine loses power, which takes longer.
    """
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    if is_flushed:
        _flush_one(part)
    os.replace(part, path)
    if is_flushed:
        _flush_one(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def write_checksums(folder: Path) -> None:
    """Write the checksums of the files below `folder` that are not text into its file CHECKSUMS."""
    files = [path for path in _files(folder) if path.suffix not in _TEXTS]
    found = {path.relative_to(folder).as_posix(): checksum(path) for path in files}
    write_text(folder / CHECKSUMS, json.dumps(found, indent=2) + "\n")


def checksum(path: Path) -> int:
    """The CRC-32 of a file. Raises OSError."""
    value = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            value = zlib.crc32(part, value)
    return value


def allow_readers(folder: Path) -> None:
    """Give safetensors files below the new `folder` the permissions that the umask gives to other new files.

    safetensors 0.8 creates them for their owner only, so that no other user, such as a server, can read them.
    """
    mode = folder.stat().st_mode & 0o666  # the umask itself cannot be read without changing it for all threads
    for path in folder.rglob("*.safetensors"):
        with suppress(OSError):  # some network file systems have no permissions of single files
            path.chmod(path.stat().st_mode | mode)


def flush(folder: Path) -> None:
    """Flush all files and folders below `folder` to the disk; without effect on Windows."""
    for path in _files(folder):
        _flush_one(path)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _flush_one(path)


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flush_one(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exists(path: Path) -> bool:
    """Whether `path` exists; False for names that the system does not accept, such as very long ones."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_pointer(path: Path) -> bool:
    """Whether Git LFS has not downloaded the contents of a file."""
    try:
        with path.open("rb") as file:
            return file.read(23) == b"version https://git-lfs"
    except OSError:
        return False  # reported when it is read


def is_free(path: Path, *starts: bytes) -> bool:
    """Whether writing to `path` replaces or extends no file of others: a file there is empty or has one of `starts`."""
    try:
        with path.open("rb") as file:
            begin = file.read(max(map(len, starts)))
    except FileNotFoundError:
        return True
    return not begin or begin.lower().startswith(starts)


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError if it cannot be read, and ValueError if it does not contain one."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {found!r:.60}")
    return found


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file by the names of tensors, and where its data begins. Raises ValueError."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        if length > path.stat().st_size - 8:
            raise ValueError("its header is truncated")
        header = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


@contextmanager
def locked(path: Path, hint: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of `path`, a file `.NAME.lock` next to it; other processes wait. Parent folders are created.

    `waiting` is called before this process waits for another one; `hint` is for errors.
    """
    with doing(f"writing to {path.parent} ({hint})"):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / f".{path.name}.lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            waiting()
            held = lock.acquire()
    with held:
        yield


LARGEST_HASHED = 2**30  # bytes; reading larger files at the start of every run takes too long


def file_fingerprint(path: Path) -> str:
    """The hash of a file's content; of a file above `LARGEST_HASHED` bytes, its path, size and modification time."""
    stat = path.stat()
    if stat.st_size > LARGEST_HASHED:
        return f"{path.resolve()}, {stat.st_size} bytes, modified {stat.st_mtime_ns}"
    return file_hash(path)


def file_hash(path: Path) -> str:
    """The SHA-256 hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def json_hash(value: Any) -> str:
    """The SHA-256 hash of a value as JSON, whatever the order of the keys in it."""
    return text_hash(json.dumps(value, sort_keys=True, default=str))


PACKED = (".gz", ".zst")  # endings of the names of files that `opened` unpacks


@contextmanager
def opened(path: Path) -> Iterator[BufferedIOBase]:
    """The bytes of a file, unpacked if its name ends with one of `PACKED`."""
    ending = path.suffix.lower()
    with doing(f"reading {path}"), path.open("rb") as file:
        if ending == ".zst":
            reader = import_module("zstandard").ZstdDecompressor().stream_reader(file, read_across_frames=True)
            yield BufferedReader(reader)
        else:
            yield gzip.GzipFile(fileobj=file) if ending == ".gz" else file


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a mark of the byte order.

    Raises DataError with the file and the line of the first invalid byte.
    """
    with opened(path) as file:
        data = file.read()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not valid UTF-8 (byte {data[error.start]:#04x} at offset {error.start}). "
            "Convert the file to UTF-8 or leave it out."
        ) from error


_ALL = 2**26  # bytes; weights and files up to this size are read as a whole
_BLOCK = 2**14  # bytes read of each tensor of larger weights
_TENSORS = 4096  # at most this many of their tensors are sampled
_BLOCKS = 1024  # of larger files that are not safetensors
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
# Entries of JSON files about the place or the program that saved them, and the template, which is compared separately.
_LEFT_OUT = ("name_or_path", "is_local", "local_files_only", "transformers_version", "chat_template")


def weights_hash(folder: Path, gguf_file: str | None = None) -> str | None:
    """The tensors of the model or the adapter in `folder`: their names, types and shapes, and a sample of each.

    None if there are no weights, or if they cannot be read, which is reported where they are loaded.
    """
    try:
        if gguf_file is not None:
            return sample_hash(folder / gguf_file)
        found = first_weights(folder, (*ADAPTER_WEIGHTS, *MODEL_WEIGHTS))
        files = sorted(folder.glob("*.safetensors")) if found is None else [found]
        files = indexed_files(found) if found is not None and found.suffix == ".json" else files
        if files and files[0].suffix == ".safetensors":
            return _tensors_hash(files)
        return json_hash([sample_hash(path) for path in files]) if files else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None


def tokenizer_hashes(folder: Path) -> dict[str, str]:
    """The hash of each file of the tokenizer in `folder`; of JSON files, the hash of their contents."""
    paths = {path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    settings = lambda path: json_hash(settings_of(folder, path.name)) if path.suffix == ".json" else file_hash(path)
    return {path.name: settings(path) for path in sorted(paths)}


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    """The contents of a JSON file of settings such as config.json, without those that do not affect the model."""
    try:
        values = json_object(folder / name)
    except (OSError, ValueError):  # reported where it is loaded
        return {}
    return {key: value for key, value in values.items() if not key.startswith("_") and key not in _LEFT_OUT}


def sample_hash(path: Path) -> str:
    """The hash of a file's size and contents; of more than 64 MiB, of 1,024 evenly spaced blocks."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _ALL:
            found.update(file.read())
        else:
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK) * block // (_BLOCKS - 1))
                found.update(file.read(_BLOCK))
    return found.hexdigest()


# Files of weights, in the order in which transformers and PEFT look for them.
MODEL_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def first_weights(folder: Path, names: Iterable[str]) -> Path | None:
    """The first file of weights of these names in a folder, or its index; None if there is none."""
    paths = (folder / f"{name}{ending}" for name in names for ending in ("", ".index.json"))
    return next((path for path in paths if path.is_file()), None)


def indexed_files(index: Path) -> list[Path]:
    """The files that an index of weights names. Raises OSError or ValueError if it names none."""
    places = json_object(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"weight_map must name the file of each tensor, got {places!r:.60}")
    return [index.parent / name for name in sorted(set(names))]


def _tensors_hash(files: list[Path]) -> str:
    tensors: list[tuple[str, str, list[int], Path, int, int]] = []  # name, dtype, shape, file, start and end
    for path in files:
        header, begin = safetensors_header(path)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            tensors.append((name, entry["dtype"], entry["shape"], path, begin + start, begin + end))
    tensors.sort()
    reads_all = sum(end - start for *_, start, end in tensors) <= _ALL
    every = 1 if reads_all else -(-len(tensors) // _TENSORS)
    found = hashlib.sha256()
    for place, (name, dtype, shape, path, start, end) in enumerate(tensors):
        found.update(json.dumps([name, dtype, shape]).encode())
        if place % every:
            continue
        length = end - start if reads_all else min(end - start, _BLOCK)
        with path.open("rb") as file:
            file.seek(start + (end - start - length) // 2)
            found.update(file.read(length))
    return found.hexdigest()
