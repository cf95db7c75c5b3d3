"""Documents and generated tokens per second, and peak memory, between two logs."""

from __future__ import annotations

import resource
import sys

import torch


class Throughput:
    """Accumulates counts and times; `drain` returns the rates over all ranks and resets."""

    def __init__(self):
        self._documents, self._generated_tokens, self._seconds = 0, 0, 0.0

    def add(self, documents: int = 0, generated_tokens: int = 0, seconds: float = 0.0) -> None:
        self._documents += documents
        self._generated_tokens += generated_tokens
        self._seconds += seconds

    def drain(self, accelerator=None) -> dict[str, float]:
        """Return `throughput/documents_per_s`, `throughput/generated_tokens_per_s` and `memory/peak_gib`.

        The memory is the maximum over ranks. Empty if no time was added since the last call.
        """
        if self._seconds == 0:
            return {}
        device = accelerator.device if accelerator is not None else "cpu"
        sums = torch.tensor([self._documents, self._generated_tokens, self._seconds], dtype=torch.float32).to(device)
        peak = torch.tensor([peak_memory_gib()]).to(device)
        ranks = 1
        if accelerator is not None:
            ranks = accelerator.num_processes
            sums, peak = accelerator.reduce(sums, "sum"), accelerator.gather(peak).max()
        seconds = sums[2].item() / ranks
        self.__init__()
        return {
            "throughput/documents_per_s": sums[0].item() / seconds,
            "throughput/generated_tokens_per_s": sums[1].item() / seconds,
            "memory/peak_gib": peak.item(),
        }


def peak_memory_gib() -> float:
    """Return the peak memory in GiB: allocated on the current CUDA device if available, or else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
