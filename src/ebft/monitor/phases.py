"""Peak memory of the phases of a training step."""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PhaseMemory:
    """Peak memory in bytes by phase, in the order of their first use: `peaks`.

    Phases may be nested; memory used in an inner phase counts for the inner one only. On CUDA, the memory that PyTorch
    allocated on the current device; otherwise the resident memory of the process, whose high-water mark Linux lets a
    process reset. Elsewhere (`is_exact` is False) a phase is reported with the peak of the process so far. `failed_in`
    is the innermost phase in which an exception was raised.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.failed_in: str | None = None
        self._active: list[str] = []
        self._on_cuda = torch.cuda.is_available()
        gc.collect()
        self.is_exact = self._on_cuda or self._reset()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a phase; repeated phases report their maximum."""
        self.begin(name)
        try:
            yield
        except Exception:
            self.failed_in = self.failed_in or self._active[-1]
            raise
        finally:
            self.end()

    def begin(self, name: str) -> None:
        self._record()
        self.peaks.setdefault(name, 0)
        self._active.append(name)

    def end(self) -> None:
        self._record()
        self._active.pop()

    def measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` such that each of its calls is measured as a phase."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    def _record(self) -> None:
        """Add the peak since the last call to the innermost active phase."""
        if self._active:
            name = self._active[-1]
            self.peaks[name] = max(self.peaks[name], self._peak())
        self._reset()

    def _peak(self) -> int:
        if self._on_cuda:
            return torch.cuda.max_memory_allocated()
        with suppress(OSError, StopIteration):
            lines = _STATUS.read_text().splitlines()
            return 2**10 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 2**10

    def _reset(self) -> bool:
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
            return True
        try:
            # Freed memory that the allocator keeps is resident, and would be counted again.
            ctypes.CDLL(None).malloc_trim(0)
            _RESET.write_text("5")
        except (OSError, AttributeError, TypeError):  # not Linux with glibc
            return False
        return True
