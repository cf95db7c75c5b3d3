"""Seconds, peak memory, the rate of a matrix product, and what machine they were measured on."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ebft.prefix.cpu import cpu_product
from ebft.tools.doctor.environment import processor

RESULTS = Path(__file__).parent / "results"
# Rows and columns of the matrices whose product's rate is measured: large enough to be near the device's best.
GEMM_SIZE = {"cpu": 2048, "cuda": 8192}


class Clock:
    """What `timed` reads: elapsed seconds, or the CPU seconds of this process, which other work does not add to."""

    seconds: Callable[[], float] = time.perf_counter

    @classmethod
    def count_cpu_seconds(cls) -> None:
        """From now on, those of one thread, as more of them count while they wait for each other."""
        torch.set_num_threads(1)
        cls.seconds = time.process_time


def parser_of(document: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share; `defaults`: repeats, output, cpu_time."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small random model, to try the code")
    parser.add_argument("--output", type=Path, default=defaults.get("output"), help="the JSON file")
    if "repeats" in defaults:
        parser.add_argument("--repeats", type=int, default=defaults["repeats"], help="timed rounds")
    if defaults.get("cpu_time"):
        about = "count CPU seconds of one thread: for a machine with other work"
        parser.add_argument("--cpu-time", action="store_true", help=about)
    return parser


@contextmanager
def quiet_folder() -> Iterator[Path]:
    """Inside the block there is an empty folder, and no warning is shown."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        yield Path(folder)


def in_turn(ways: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """The seconds of each round of every way; the ways take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            seconds[name].append(timed(run, device)[1])
    return seconds


def store(path: Path, results: Any) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(results), indent=2) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """The same structure with floats of six digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What `run` returns, and the seconds that it and the work it queued on the device took."""
    synchronise(device)
    start = Clock.seconds()
    result = run()
    synchronise(device)
    return result, Clock.seconds() - start


def synchronise(device: torch.device) -> None:
    """Wait for a CUDA device to finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def stopwatch(owner: Any, function: str, name: str, seconds: dict[str, float], device: torch.device) -> Iterator[None]:
    """Inside the block, add what every call of `owner.function` takes to `seconds[name]`."""
    original = getattr(owner, function)
    seconds[name] = 0.0

    def watched(*args, **kwargs):
        result, taken = timed(lambda: original(*args, **kwargs), device)
        seconds[name] += taken
        return result

    with patch.object(owner, function, watched):
        yield


def with_peak_memory(run: Callable[[], Any], device: torch.device) -> tuple[Any, float | None]:
    """What `run` returns, and the MiB of its peak above what was held before; None where that cannot be read."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, (torch.cuda.max_memory_allocated(device) - before) / 2**20
    try:
        # Freed memory that the allocator keeps is resident, and would hide what is taken from it again.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _kib("self/status", "VmRSS")
    except (OSError, AttributeError):
        return run(), None
    result = run()
    return result, (_kib("self/status", "VmHWM") - before) / 2**10


@contextmanager
def within_free_memory() -> Iterator[None]:
    """Inside, on Linux without a GPU, a step that needs more than 90% of the free memory fails; it is not killed."""
    if torch.cuda.is_available():
        yield
        return
    try:
        most = (_kib("self/status", "VmData") + 0.9 * _kib("meminfo", "MemAvailable")) * 2**10
    except OSError:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    known = [limit for limit in (before, int(most)) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _kib(file: str, name: str) -> int:
    """One entry of a file of /proc."""
    lines = Path("/proc", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class GemmRate:
    """FLOP/s of a large square matrix product in one type, sampled while other things are measured."""

    def __init__(self, dtype: torch.dtype, device: torch.device, size: int | None = None):
        self.device = device
        self.size = size or GEMM_SIZE[device.type]
        self._factors = [torch.randn(self.size, self.size, device=device).to(dtype) for _ in range(2)]
        self._seconds: list[float] = []
        self._multiply()  # the first picks a kernel and starts threads

    def sample(self) -> None:
        """Three products, timed here and now."""
        self._seconds += [self._multiply() for _ in range(3)]

    def median(self) -> float:
        """The median rate over all samples."""
        return 2 * self.size**3 / statistics.median(self._seconds)

    def fastest(self) -> float:
        """The highest rate of all samples."""
        return 2 * self.size**3 / min(self._seconds)

    def _multiply(self) -> float:
        return timed(lambda: cpu_product(*self._factors), self.device)[1]


def peak_flops(device: torch.device) -> tuple[float, str] | None:
    """Peak FLOP/s of the device in bfloat16 and where the number is from; None for a card that is not known."""
    from ebft.tools.doctor.known import CARDS

    name = device_name(device).replace(" ", "").lower()
    found = [(card.bfloat16, model.upper()) for model, card in CARDS.items() if model in name]
    return next(((rate, f"{model} data sheet, dense bfloat16") for rate, model in found if rate is not None), None)


def device_name(device: torch.device) -> str:
    """The model name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor()


def machine(device: torch.device) -> dict[str, str | float | None]:
    """What the numbers depend on beside the model and the options."""
    return {
        "device": f"{device.type}: {device_name(device)}",
        "instructions": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else None,
        "threads": torch.get_num_threads(),
        "seconds": "elapsed" if Clock.seconds is time.perf_counter else "CPU time of the process",
        "load": round(os.getloadavg()[0], 1),  # of the minute before: above 1 or so, other work takes part in the times
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _commit() -> str:
    """The checked-out commit, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
