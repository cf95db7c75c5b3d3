"""Documents and generated tokens per second, and peak memory, between two log lines."""

from __future__ import annotations

import resource
import sys

import torch


class Throughput:
    """Adds up what was done and how long it took; `drain` returns the rates over all ranks and starts anew."""

    def __init__(self):
        self._documents, self._generated_tokens, self._seconds = 0, 0, 0.0

    def add(self, documents: int = 0, generated_tokens: int = 0, seconds: float = 0.0) -> None:
        self._documents += documents
        self._generated_tokens += generated_tokens
        self._seconds += seconds

    def drain(self, accelerator=None) -> dict[str, float]:
        """`throughput/documents_per_s`, `throughput/generated_tokens_per_s`, `memory/peak_gib` of the fullest rank.

        Empty where no time was added since the last call.
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
    """Peak GiB so far: of the current CUDA device where there is one, else of this process's resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
