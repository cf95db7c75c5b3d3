"""Free memory of devices, and free space on disks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from ebft.doctor.environment import memory_bytes


def available_memory(device: str | None = None) -> tuple[int | None, str]:
    """Return the free bytes of a device, and what it is; None if unknown.

    `device` is cpu, a GPU such as cuda:1, or `auto` for all GPUs together; None for the device that trains.
    """
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
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1], torch.cuda.get_device_name()
    return memory_bytes(), "this machine"


def free_disk(folder: str) -> tuple[int, Path]:
    """Return the free bytes on the disk of an output folder, and its nearest folder that exists."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free, existing


def is_writable(folder: Path) -> bool:
    """Whether files can be created in an existing folder, tested by creating one."""
    path = folder / f".ebft-doctor-{os.getpid()}"
    try:
        path.write_bytes(b"")
        path.unlink()
    except OSError:
        return False
    return True
