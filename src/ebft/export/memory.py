"""The peak of the memory of this process."""

from __future__ import annotations

import resource
import sys


def peak_bytes() -> int:
    """The largest resident memory of this process so far, in bytes; it includes pages of files that are mapped."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def as_mib(size: int) -> str:
    """A number of bytes in MiB, as text."""
    return f"{size / 2**20:,.1f} MiB"
