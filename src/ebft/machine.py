"""Accelerators, processes, memory, disk space and installed packages of this machine."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

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
