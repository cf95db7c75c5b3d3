"""The number type in which a CPU multiplies matrices fastest."""

import time

import torch


def bfloat16_is_fast() -> bool:
    """Whether this machine multiplies matrices in bfloat16 faster than in float32.

    Processors without bfloat16 instructions emulate it, far more slowly. Measured rather than looked up, as each kind
    of processor would need its own check. With an accelerator the answer is yes.
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
