"""Free memory of devices."""

from __future__ import annotations

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
