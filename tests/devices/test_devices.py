"""Training on the pretend accelerator of `pretend.py`: no operation mixes devices, and all numbers are the CPU's."""

import subprocess
import sys

import pytest

from tests.devices.__main__ import CASES
from tests.devices.pretend import is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason="a real accelerator, or a PyTorch without Python backends")
FAST = ["strided_lora"]


def output(*arguments):
    """What a process of its own prints, since PyTorch has to know of the device before the first backward pass."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("method", ["strided", "structured", ""])
def test_runs(method):
    """A process for each mode and for all other methods."""
    of_mode = [name for name in CASES if name not in FAST and name.startswith(("strided", "structured"))]
    names = [name for name in of_mode if name.startswith(method)] if method else [*CASES.keys() - {*of_mode, *FAST}]
    assert output("-m", "tests.devices", *names).count(" kernels, ") == len(names)


SCRIPT = """
import torch
from tests.devices.pretend import MixedDevices, pretend_device, record, register

register()
assert not torch.accelerator.is_available()
with pretend_device() as device, record() as counts:
    assert torch.accelerator.current_accelerator().type == device.type
    there, here, bools = torch.ones(3, 4, device=device), torch.ones(3, 4), torch.ones(3, 4).bool()
    other, index, large = there.to("pretend:1"), torch.tensor([0, 2]), torch.ones(300, 100)
    of_device, times_of_device = index.to(device), torch.tensor([1, 2, 3]).to(device)
    assert large.pin_memory()[1:].is_pinned() and not large.is_pinned() and not large.pin_memory().clone().is_pinned()
    for mixes in (
        lambda: there + here, lambda: there + other, lambda: here.add_(there), lambda: here[index.to(device)],
        lambda: torch.cat([there, here]), lambda: there.masked_fill(bools, 0), lambda: there @ here.T,
        lambda: torch.nn.functional.embedding(index, there), lambda: there[other.long()],
        lambda: torch.rand(2, device=device, generator=torch.Generator().manual_seed(1)),
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
        (lambda: there[there > 0], 1), (lambda: there.nonzero(), 1), (lambda: bool(there.any()), 1),
        (lambda: there[index], 1), (lambda: there[of_device], 0), (lambda: torch.linalg.svd(there), 1),
        (lambda: here.to(device), 1), (lambda: there.copy_(here), 1), (lambda: there * torch.tensor(2.0), 0),
        (lambda: torch.as_tensor([1, 2], device=device), 1), (lambda: torch.arange(3, device=device), 0),
        (lambda: here.pin_memory().to(device), 1), (lambda: large.to(device, non_blocking=True), 1),
        (lambda: large.pin_memory()[1:].to(device, non_blocking=True), 0),
        (lambda: large.pin_memory()[:, 1:].to(device, non_blocking=True), 1),
        (lambda: large.pin_memory().to(device, torch.float64, non_blocking=True), 1),
        (lambda: here.to(device, non_blocking=True), 0),
        (lambda: there.where(there > 0, torch.tensor(1.0)), 1), (lambda: there.where(there > 0, 1.0), 0),
        (lambda: torch.tensor([], device=device), 0), (lambda: there.repeat_interleave(times_of_device, 0), 1),
    ):
        before = counts.copy()
        wait()
        found = counts.since(before)
        assert sum(found.waits.values()) == times, (wait.__code__.co_firstlineno, found)
    with torch.autocast("pretend", torch.bfloat16):  # the dtypes of CUDA, some of which are not those of the CPU
        found = there @ there.T
        assert (found.dtype, (found + 1).dtype, found.softmax(-1).dtype) == (*[torch.bfloat16] * 2, torch.float32)
    torch.rand(2, device=device, generator=torch.Generator(device).manual_seed(1))
    weight = torch.nn.Parameter(there[:, :2].clone())
    (there.T @ weight).square().sum().backward()
    assert weight.grad.device == device and torch.equal(weight.grad.cpu(), torch.full((3, 2), 24.0))
    assert weight.grad.device.index == 0 and (other @ other.T).device.index == 1
assert not torch.accelerator.is_available()
"""


def test_the_device_itself_and_strided_runs():
    script = f"{SCRIPT}\nfrom tests.devices.__main__ import main\nraise SystemExit(main({FAST}))"
    assert output("-c", script).count(" kernels, ") == len(FAST)


OWN_BATCHES = """
import sys
import torch
from transformers import Trainer
from ebft import StridedEBFTConfig, StridedEBFTTrainer
from ebft.rewards import whiten
from tests.devices.pretend import pretend_device, record, register
from tests.strided.families import tiny_model
from tests.strided.short_run import documents

register()

def trained(are_on_device):
    with pretend_device(), record() as counts:
        args = {"max_steps": 2, "save_strategy": "no", "disable_tqdm": True, "report_to": [], "grad_norms_every": 1}
        args = StridedEBFTConfig(output_dir=sys.argv[1], logging_steps=1, learning_rate=1e-3, **args)
        trainer = StridedEBFTTrainer(model=tiny_model("llama"), args=args, train_dataset=documents()[:12])
        if are_on_device:  # as those of a trainer of transformers
            trainer.get_train_dataloader = lambda: Trainer.get_train_dataloader(trainer)
        trainer.train()
        batch = next(iter(trainer.get_train_dataloader()))
        assert batch["input_ids"].device.type == ("pretend" if are_on_device else "cpu")
        assert trainer._prepare_inputs(batch)["labels"].device.type == "pretend"
        loss = trainer.compute_loss(trainer.model, batch).item()
        return loss, [w.detach().cpu() for w in trainer.model.parameters()], sum(counts.waits.values())

(loss, weights, waits), (other_loss, other_weights, more_waits) = trained(False), trained(True)
assert loss == other_loss and all(map(torch.equal, weights, other_weights)) and waits < more_waits
with pretend_device() as device:
    for samples in (4, 9):  # whose decomposition is on CPU, and on the device
        x, y = torch.randn(3, samples, 20), torch.randn(3, 20)
        for space in ("feature", "sample"):
            for found, wanted in zip(whiten(x.to(device), y.to(device), space), whiten(x, y, space)):
                assert found.device == device and torch.equal(found.cpu(), wanted)
        try:
            whiten(x.to(device) * torch.inf, y.to(device))
        except ValueError as error:
            assert "NaN or infinity" in str(error)
        else:
            raise AssertionError("nothing was raised")
"""


@pytest.mark.slow
def test_batches_on_the_device_give_the_same_results(tmp_path):
    output("-c", OWN_BATCHES, str(tmp_path))
