"""Gradient norms of the terms of the loss, each by a backward pass of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class TermGradients:
    """Gradients of the terms of a loss, summed over the micro-batches of an optimizer step.

    Nothing is added to the parameters' own `.grad`: hooks that accumulate or reduce gradients (DDP's among them) do
    not run, and the graph stays for the backward pass of the loss.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, **terms: Tensor) -> None:
        """Add the gradient of each term, a scalar, to what its name has so far. A term without a graph adds nothing."""
        for name, term in terms.items():
            sums = self._sums.setdefault(name, [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters])
            if not term.requires_grad:
                continue
            with torch.autocast(term.device.type, enabled=False):
                grads = torch.autograd.grad(term, self._parameters, retain_graph=True, allow_unused=True)
            for total, grad in zip(sums, grads):
                if grad is not None:
                    total += grad

    def drain(self, accelerator: Any) -> dict[str, float]:
        """Norm over all parameters of each term's gradient, summed over ranks, by name; then starts anew."""
        norms = {}
        for name, sums in self._sums.items():
            squares = [accelerator.reduce(total, "sum").double().square().sum().item() for total in sums]
            norms[name] = sum(squares) ** 0.5
        self._sums.clear()
        return norms
