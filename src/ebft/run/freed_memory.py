"""Memory that a training process on CPU frees, and takes again in its next step."""

import ctypes
import os
import platform

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the operating system, if training runs on CPU.

    A training step allocates and frees temporaries of tens of megabytes. By default glibc requests many of them from
    the operating system each time, and every page is zeroed when it is first used. Memory that was used once then
    stays with the process, whose peak can be higher if the sizes change from step to step. Applies to the whole
    process. Environment variables MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_ that are set take
    precedence; with other C libraries, or an accelerator, there is no effect.
    """
    chosen = any(f"MALLOC_{name}_" in os.environ for name in ("MMAP_MAX", "TRIM_THRESHOLD", "MMAP_THRESHOLD"))
    if chosen or platform.libc_ver()[0] != "glibc" or torch.accelerator.is_available():
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)  # no allocation in a mapping of its own
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never shrink the heap
