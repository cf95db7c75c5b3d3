"""Training on the pretend accelerator of `pretend.py`: no operation mixes devices, and all numbers are the CPU's."""

import subprocess
import sys

import pytest
import torch

from tests.devices.__main__ import CASES

pytestmark = [
    pytest.mark.skipif(
        not hasattr(torch._C, "_acc") or not hasattr(torch._C._acc, "register_python_privateuseone_device_guard"),
        reason="this version of PyTorch has no backends that are written in Python",
    ),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a real accelerator, which other tests use"),
]
FAST = ("strided_lora", "strided_full")


def output(*arguments):
    """What a process of its own prints, since PyTorch has to know of the device before the first backward pass."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_strided_runs():
    assert " kernels, " in output("-m", "tests.devices", *FAST)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in FAST])
def test_a_run(name):
    assert " kernels, " in output("-m", "tests.devices", name)


@pytest.mark.slow
def test_kernels_of_a_step():
    """Of a model with 16 layers; without folded adapters and fused layers, there are twice as many."""
    table = output("-m", "benchmarks.kernels", "--lengths", "512")
    steps = {line.split()[0]: int(line.split()[2].replace(",", "")) for line in table.splitlines() if " 512 " in line}
    assert steps["full"] <= 6500 and steps["LoRA"] <= 8500, table


SCRIPT = """
import torch
from tests.devices.pretend import MixedDevices, pretend_device, record, register

register()
assert not torch.accelerator.is_available()
with pretend_device() as device, record() as counts:
    assert torch.accelerator.current_accelerator().type == device.type
    there, here, bools = torch.ones(3, 4, device=device), torch.ones(3, 4), torch.ones(3, 4).bool()
    other, index = there.to("pretend:1"), torch.tensor([0, 2])
    for mixes in (
        lambda: there + here, lambda: there + other, lambda: here.add_(there), lambda: here[index.to(device)],
        lambda: there.index_select(0, index), lambda: torch.cat([there, here]), lambda: there.masked_fill(bools, 0),
        lambda: torch.where(bools, there, there), lambda: there @ here.T,
        lambda: there.clone().index_copy_(0, index, there[1:]),
        lambda: torch.nn.functional.embedding(index, there), lambda: there[other.long()],
    ):
        try:
            mixes()
        except (MixedDevices, RuntimeError) as error:
            assert "device" in str(error), error
        else:
            raise AssertionError(f"line {mixes.__code__.co_firstlineno}: nothing was raised")
    assert (there * torch.tensor(2.0)).device == device  # as with CUDA
    for wait, times in (
        (lambda: there.sum().item(), 1), (lambda: there.tolist(), 1), (lambda: there.cpu(), 1), (lambda: there + 1, 0),
        (lambda: there[there > 0], 1), (lambda: there.nonzero(), 1), (lambda: there.unique(), 1),
        (lambda: bool(there.any()), 1), (lambda: there[index], 1), (lambda: there[index.to(device)], 0),
        (lambda: there[:, 1:], 0), (lambda: there.repeat_interleave(index.new_tensor([1, 2, 3]).to(device), 0), 1),
    ):
        before = counts.copy()
        wait()
        found = counts.since(before)
        assert (sum(found.waits.values()) >= 1) == bool(times), (wait.__code__.co_firstlineno, found)
    weight = torch.nn.Parameter(there[:, :2].clone())
    (there.T @ weight).square().sum().backward()
    assert weight.grad.device == device and torch.equal(weight.grad.cpu(), torch.full((3, 2), 24.0))
    assert weight.grad.device.index == 0 and (other @ other.T).device.index == 1
assert not torch.accelerator.is_available()
"""


def test_the_device_itself():
    output("-c", SCRIPT)
