"""Whether the files of a checkpoint are complete, judged by their contents.

Checkpoints of this package are renamed into place when they are complete. Incomplete ones come from other programs,
from copies that were cut off, and from damaged disks.
"""

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebft.files import CHECKSUMS, STATE, checksum
from ebft.models.sharded_index import INDEX, OPTIMIZER, WEIGHTS, check_files
from ebft.run.same_run import RUN_FILE
from ebft.trainer.checkpoints import step_in_name

_WEIGHTS = ("*model*.safetensors", "*model*.bin", "pytorch_model_fsdp*", "global_step*", "*/adapter_model.safetensors")
_OPTIMIZER = ("optimizer*", "global_step*")  # a file, FSDP's folder, DeepSpeed's folder
_RANDOM = ("rng_state*.pth",)


class DamagedError(Exception):
    """A checkpoint cannot be used; the message names the file and what is wrong with it."""


class UnreadableError(DamagedError):
    """The permissions of a checkpoint, which may be complete, do not allow reading it."""


def check_complete(checkpoint: Path, reads_all: bool = True) -> None:
    """Raise DamagedError if a file of a checkpoint is missing or damaged; it may have no optimizer state at all.

    Without `reads_all`, checksums are not computed, which is faster for large files. Raises UnreadableError if the
    permissions do not allow reading it.
    """
    try:
        _check(checkpoint, reads_all)
    except PermissionError as error:
        raise UnreadableError(f"{error.filename or checkpoint} cannot be read ({error.strerror})") from error


def _check(checkpoint: Path, reads_all: bool) -> None:
    if not (checkpoint / STATE).is_file():
        raise DamagedError(f"it has no {STATE}")
    sums = _read_checksums(checkpoint)
    listed = {checkpoint / name for name in sums}
    for path in _files(checkpoint):
        check = _CHECKS.get(path.suffix)
        if path.is_file() and check is not None:
            try:
                check(path, reads_all and path not in listed)
            except PermissionError:
                raise
            except (OSError, ValueError, struct.error, zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
                raise DamagedError(f"{path.relative_to(checkpoint)} is damaged ({error})") from error
    try:
        state = read_json(checkpoint / STATE)
    except ValueError as error:
        raise DamagedError(f"{STATE} is damaged ({error})") from error
    if not isinstance(state.get("global_step"), int):
        raise DamagedError(f"{STATE} is damaged (it has no global_step)")
    if step_in_name(checkpoint) not in (None, state["global_step"]):
        name = f"checkpoint-{state['global_step']}"
        raise DamagedError(f"it contains step {state['global_step']}, unlike its name; to use it, rename it to {name}")
    _check_weights(checkpoint)
    _check_parts(checkpoint)
    _check_training_state(checkpoint)
    _check_listed(checkpoint, sums, reads_all)


def _files(folder: Path) -> list[Path]:
    """All files below a folder, which must all be readable; `Path.rglob` would leave out other folders."""

    def fail(error: OSError) -> None:
        raise error

    return sorted(Path(parent) / name for parent, _, names in os.walk(folder, onerror=fail) for name in names)


def has_optimizer_state(checkpoint: Path) -> bool:
    """Whether a checkpoint has optimizer state: a file or folder `optimizer*`, or DeepSpeed's `global_step*`."""
    return _has(checkpoint, _OPTIMIZER)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises OSError or ValueError."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def _read_checksums(checkpoint: Path) -> dict[str, int]:
    """The checksums of the checkpoint's files; none if it is of another program or of an earlier release."""
    try:
        return read_json(checkpoint / CHECKSUMS) if (checkpoint / CHECKSUMS).is_file() else {}
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedError(f"{CHECKSUMS} is damaged ({error})") from error


def _check_listed(checkpoint: Path, sums: dict[str, int], reads_all: bool) -> None:
    """Check that the files that have checksums are there and, with `reads_all`, unchanged."""
    for name, value in sums.items():
        if not (checkpoint / name).is_file():
            raise DamagedError(f"it has no {name}")
        try:
            is_same = not reads_all or checksum(checkpoint / name) == value
        except PermissionError:
            raise
        except OSError as error:
            raise DamagedError(f"{name} is damaged ({error})") from error
        if not is_same:
            raise DamagedError(f"{name} is damaged (wrong checksum)")


def _check_weights(checkpoint: Path) -> None:
    if not _has(checkpoint, _WEIGHTS):
        raise DamagedError("it has no weights (model.safetensors or adapter_model.safetensors)")
    for index in checkpoint.glob("*.index.json"):
        for name in sorted(set(read_json(index).get("weight_map", {}).values())):
            if not (checkpoint / name).is_file():
                raise DamagedError(f"it has no {name}, which {index.name} names")
    if any(checkpoint.glob("adapter_model*")) and not (checkpoint / "adapter_config.json").is_file():
        raise DamagedError("it has no adapter_config.json")
    has_adapter = any(checkpoint.glob("adapter_model*")) or (checkpoint / WEIGHTS).is_dir()
    if (checkpoint / "adapter_config.json").is_file() and not has_adapter:
        raise DamagedError("it has no adapter_model.safetensors")


def _check_parts(checkpoint: Path) -> None:
    """Check that the parts of the processes of a sharded run are all there, by the index of each folder."""
    for folder in (checkpoint / WEIGHTS, checkpoint / OPTIMIZER):
        if folder.is_dir():
            try:
                check_files(folder)
            except FileNotFoundError as error:
                raise DamagedError(f"it has no {folder.name}/{INDEX}") from error
            except (OSError, ValueError) as error:
                raise DamagedError(f"{folder.name} is damaged ({error})") from error


def _check_training_state(checkpoint: Path) -> None:
    """Check that optimizer, scheduler and random state are all there, or none of them, as with save_only_model."""
    names = {"optimizer state": _OPTIMIZER, "rng_state.pth": _RANDOM}
    if not any(checkpoint.glob("global_step*")):  # DeepSpeed may keep the schedule in its own folder
        names["scheduler.pt"] = ("scheduler.pt",)
    missing = [name for name, patterns in names.items() if not _has(checkpoint, patterns)]
    if missing and len(missing) < len(names):
        raise DamagedError(f"it has no {' and no '.join(missing)}")
    if (checkpoint / RUN_FILE).is_file():  # of this package, which writes both files of a process
        for path in sorted(checkpoint.glob("rng_state*.pth")):
            name = path.name.replace("rng_state", "running_state")
            if not (checkpoint / name).is_file():
                raise DamagedError(f"it has no {name}")


def _has(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(found for pattern in patterns for found in folder.glob(pattern))


def _check_safetensors(path: Path, reads_all: bool) -> None:
    """Check that the header can be read and that the file has the length that it gives."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        if length > size - 8:
            raise ValueError("its header is truncated")
        header = json.loads(file.read(length))
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if size != 8 + length + end:
        raise ValueError(f"it has {size} bytes instead of {8 + length + end}")


def _check_archive(path: Path, reads_all: bool) -> None:
    """Check a file of torch.save: that its list of contents, which is written last, and the checksums are right."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip() if reads_all else None
    if damaged is not None:
        raise ValueError(f"wrong checksum of {damaged}")


def _check_json(path: Path, reads_all: bool) -> None:
    json.loads(path.read_text(encoding="utf-8"))


_CHECKS: dict[str, Callable[[Path, bool], None]] = {
    ".json": _check_json,
    ".safetensors": _check_safetensors,
    ".pt": _check_archive,
    ".pth": _check_archive,
    ".bin": _check_archive,
}
