"""A CUDA graph that a CPU pretends to record: operations that are repeated on the same memory, as one kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebft.models.causal_lm import recorded_products
from ebft.prefix import gpu
from tests.devices import counting

HOST_READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "_unique2", "equal", "masked_select", "bincount"}


class PretendRecording(TorchDispatchMode):
    """As `ebft.prefix.gpu.Recording`, on CPU. Reading a value on the host is an error."""

    count = replays = 0

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor):
        super().__init__()
        self._calls: list[tuple[Any, ...]] = []
        self._inputs = [each.clone() for each in inputs]
        with self, recorded_products() as self._report:
            self._result = function(*self._inputs)
        self._result.fill_(torch.nan)  # as recording computes nothing
        type(self).count += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in HOST_READS, f"{name} in a recorded pass"
        result = function(*args, **kwargs or {})
        if not function.is_view:  # views remain those of the same memory
            self._calls.append((function, args, kwargs or {}, result))
        return result

    def __call__(self, *inputs: Tensor) -> Tensor:
        type(self).replays += 1
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        with counting.record():
            for function, args, kwargs, result in self._calls:
                for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs))):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
        counting.current.kernels[counting.line_of_package()] += 1
        self._report()
        return self._result


def pretend_recordings(monkeypatch) -> None:
    """Let passes be recorded on CPU, and count them from 0."""
    monkeypatch.setattr(gpu, "can_record", lambda device: True)
    monkeypatch.setattr(gpu, "Recording", PretendRecording)
    PretendRecording.count = PretendRecording.replays = 0
