"""Two settings that decide how long a step takes on a CPU: the number type, and what happens to freed memory."""

import ctypes
import platform
import time

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the operating system.

    A training step allocates and frees temporaries of tens of megabytes. By default glibc maps each of them anew, and
    the page faults of that took a third of the time of a step. Memory that was used once then stays with the process.
    Does nothing with other C libraries. The environment variables MALLOC_MMAP_MAX_ and MALLOC_TRIM_THRESHOLD_ do the
    same.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)  # no allocation in a mapping of its own
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never shrink the heap


def bfloat16_is_fast() -> bool:
    """Whether this machine multiplies matrices in bfloat16 faster than in float32.

    Processors without bfloat16 instructions emulate it, at a tenth of the speed. Measured rather than looked up, as
    each kind of processor would need its own check. With an accelerator the answer is yes.
    """
    if torch.accelerator.is_available():
        return True
    return _product_seconds(torch.bfloat16) < _product_seconds(torch.float32)


def _product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a product of the size that is common in SmolLM2-135M, the fastest of several."""
    inputs, weights = torch.ones(512, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        torch.nn.functional.linear(inputs, weights)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
