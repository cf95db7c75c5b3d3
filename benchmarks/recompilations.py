"""Whether a step is compiled again when documents change: each time would cost seconds in a real run."""

from __future__ import annotations

import torch

from benchmarks.presets import OPTIONS, Preset, document
from benchmarks.sides import Side

WARM_UP = 3  # torch.compile makes a size dynamic when it has seen a second value of it


def recompilations(side: Side, preset: Preset, length: int, steps: int) -> int:
    """Frames that TorchDynamo compiled in `steps` steps, each with another prompt length, after warming up."""
    from torch._dynamo.utils import counters  # slow to import where nothing is compiled

    inputs = document(preset, length, side.device)
    room = length - OPTIONS["generate_max_len"] - OPTIONS["context_length"]
    for index in range(WARM_UP + steps):
        if index == WARM_UP:
            before = counters["frames"]["total"]
        prompt = OPTIONS["context_length"] + index * room // (WARM_UP + steps)
        side.step({**inputs, "prompt_length": torch.tensor([prompt], device=side.device)})
    return counters["frames"]["total"] - before
