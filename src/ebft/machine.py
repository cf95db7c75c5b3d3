"""Accelerators, memory, disk space and installed packages of this machine; and this process among all that train
together: its rank, the command that started it, signals, and one error of all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


_GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Accelerator support, number of processes, and names of the available devices."""

    has_accelerator: bool
    supports_bf16: bool
    processes: int = 1
    devices: tuple[str, ...] = ("cpu",)
    supports_tf32: bool = False
    supports_float8: bool = True


def memory_bytes() -> int | None:
    """Return the memory of this machine, or of its container if that has a lower limit. None if unknown."""
    known = []
    with suppress(OSError, ValueError, AttributeError):  # not on this operating system
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            known.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such control group, or no limit
            continue
    return min(known, default=None)


def available_memory(device: str | None = None) -> tuple[int | None, str]:
    """Return the free bytes of a device, and what it is; None if unknown.

    `device` is cpu, a GPU such as cuda:1, or `auto` for all GPUs together; None for the device that trains.
    """
    import torch

    if torch.cuda.is_available() and device != "cpu":
        if device == "auto":
            count = torch.cuda.device_count()
            return sum(torch.cuda.mem_get_info(index)[0] for index in range(count)), f"{count} GPUs"
        return torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return memory_bytes(), "this machine (total memory)"
    limit = memory_bytes()
    return (free if limit is None else min(free, limit)), "this machine"


def total_memory() -> tuple[int | None, str]:
    """Return the bytes of memory of the device that trains, used or not, and what it is; None if unknown."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1], torch.cuda.get_device_name()
    return memory_bytes(), "this machine"


def copy_to(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return CPU tensors of one dtype on `device`, in a single copy that does not wait for what the device computes.

    Of a device, they are views of the same memory.
    """
    import torch

    if device.type == "cpu":
        return list(tensors)
    together = torch.cat([tensor.flatten() for tensor in tensors])
    # From other memory, CUDA copies when the device has computed everything before.
    if torch.accelerator.is_available() and device.type != "mps":
        together = together.pin_memory()
    parts = together.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def bfloat16_is_fast() -> bool:
    """Whether this machine multiplies faster in bfloat16, measured: processors without its instructions emulate it."""
    import torch

    return torch.accelerator.is_available() or _product_seconds(torch.bfloat16) < _product_seconds(torch.float32)


def _product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a product of the size that is common in SmolLM2-135M, the fastest of several."""
    import torch

    inputs, weights = torch.ones(512, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
    return min(timeit.repeat(lambda: torch.nn.functional.linear(inputs, weights), number=1, repeat=10))


def peak_resident() -> int:
    """Return the largest resident memory of this process so far, in bytes, with pages of files that are mapped."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10


def free_disk(folder: str | Path) -> tuple[int, Path]:
    """Return the free bytes on the disk of an output folder, and its nearest folder that exists."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free, existing


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gib(size: float) -> str:
    """Return a number of bytes in MiB or GiB."""
    if size < _GIB:
        return f"{size / 2**20:.0f} MiB"
    return f"{size / _GIB:.1f} GiB" if size < 10 * _GIB else f"{size / _GIB:.0f} GiB"


LAUNCH_FOLDER = "EBFT_LAUNCH_FOLDER"  # environment variable: the folder that the processes of one machine share
TYPED = "EBFT_TYPED_COMMAND"  # environment variable: the words that the user typed, if not the process's words
LAUNCH_PARENT = "EBFT_PARENT"  # environment variable: the id of the command that starts and stops this one
COMMAND_FILE = "command.json"  # file in it: the words of the command that started the launch
FAILED_FILE = "failed"  # file in it: the rank of the first process that reported an error
ERROR_FILE = "error"  # file in it: the error of that process, if it may follow from the end of another one
# Variables that launchers set for each process, which PyTorch reads.
LAUNCHER = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENDED = 130  # exit status of a process that starts after the launch was interrupted

_POLL = 1.0  # seconds between two looks at the parent

_folder: Path | None = None
_typed: list[str] | None = None


def is_launched() -> bool:
    """Whether a launcher, such as torchrun, started this process."""
    return _folder is not None or any(
        name in os.environ
        for name in ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_DYNAMO_MODE")  # the last: accelerate
    )


def join_launch() -> None:
    """Report the id of this process to the `ebft train` that started it, if one did, which passes on signals to it."""
    global _folder, _typed
    # Removed from the environment: processes that this one starts do not belong to the launch.
    typed = os.environ.pop(TYPED, None)
    _typed = None if typed is None else json.loads(typed)
    name = os.environ.pop(LAUNCH_FOLDER, None)
    if name is None:
        return
    if not is_main_process():  # one set of progress bars; read by datasets and transformers when they are imported
        os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    _folder = Path(name)
    try:
        (_folder / f"{rank()}.pid").write_text(str(os.getpid()))
    except OSError:  # the launch was interrupted, and its folder was deleted
        sys.exit(_ENDED)


def launch_command(words: Sequence[str]) -> list[str] | None:
    """The words of the command that started this process: `words`, or the words of the `ebft train` that launched it.

    None if another launcher did, whose command is unknown.
    """
    if _folder is not None:
        return json.loads((_folder / COMMAND_FILE).read_text(encoding="utf-8"))
    return None if is_launched() else typed_command(words)


def typed_command(words: Sequence[str]) -> list[str]:
    """The words that the user typed: `words`, unless another command, such as a dashboard, passed them on."""
    return list(words if _typed is None else _typed)


def reports_failure() -> bool:
    """Whether this process prints its error: the first process of the machine that fails does, or a single one.

    The others usually fail with the same error, or because the first one has ended.
    """
    if _folder is None:
        return True
    try:
        with (_folder / FAILED_FILE).open("x") as file:
            file.write(rank())
    except FileExistsError:
        return (_folder / FAILED_FILE).read_text() == rank()
    except OSError:
        return True
    return True


def leave_error(text: str) -> bool:
    """Leave an error of a library to the `ebft train` that started this process; False if this process is to print it.

    It is printed when all processes have ended, unless it follows from a process that was killed.
    """
    if _folder is None:
        return False
    if reports_failure():
        try:
            (_folder / ERROR_FILE).write_text(text, encoding="utf-8", errors="replace")
        except OSError:
            return False
    return True


def has_failed() -> bool:
    """Whether a process of this launch has reported an error, so that training cannot go on."""
    return _folder is not None and (_folder / FAILED_FILE).exists()


def watch_parent() -> None:
    """Stop this process, as SIGTERM does, when the command that started it is gone: SIGKILL cannot be passed on."""
    value = os.environ.pop(LAUNCH_PARENT, None)  # processes that this one starts have another parent
    parent = os.getppid()  # the command, or a process between

    def watch() -> None:
        while os.getppid() == parent and is_alive(int(value)):
            time.sleep(_POLL)
        os.kill(os.getpid(), signal.SIGTERM)

    if value is not None:
        threading.Thread(target=watch, name="parent", daemon=True).start()


def is_alive(pid: Any) -> bool:
    """Whether a process with this id exists on this machine, apart from one that has ended and waits for its parent."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True


def rank() -> str:
    """The rank of this process among all that train together, before and after torch.distributed is initialized.

    RANK without LOCAL_RANK, by which accelerate decides, is left from something else than a launch.
    """
    return os.environ.get("RANK", "0") if "LOCAL_RANK" in os.environ else "0"


def is_main_process() -> bool:
    """Whether this process is the first of all that train together, which writes files and prints."""
    return rank() == "0"


SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def signal_handler(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` for these signals inside the block, instead of their usual effect; nohup ignores SIGHUP."""
    always = (signal.SIGINT, signal.SIGTERM)
    handled = [number for number in numbers if number in always or signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """The numbers of the signals that arrive in the block, in their order, instead of their usual effect."""
    received: list[int] = []
    with signal_handler(SIGNALS, lambda number, _: received.append(number)):
        yield received


def passed_on(number: int) -> int:
    """The signal that a training process gets for one that arrived here: it handles SIGINT and SIGTERM."""
    return number if number == signal.SIGINT else signal.SIGTERM
