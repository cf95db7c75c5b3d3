"""Two processes with DeepSpeed's ZeRO train as one does; skipped where DeepSpeed is not installed.

On CPU, accelerate starts DeepSpeed without a process group of its own, so that every process would be the only one, and
`ebft train` refuses it. These tests name the backend instead.
"""

import os

import pytest
from accelerate.state import PartialState
from accelerate.utils import DistributedType

import ebft.run.training
from tests.run.test_sharded import RUNS, assert_same, inject, trained  # noqa: F401  a fixture

pytestmark = pytest.mark.slow  # DeepSpeed compiles an extension
# Adam of PyTorch, which DeepSpeed supports on CPU.
KEYS = {"optimizer": "adamw_torch"}


def on_cpu():
    inject()
    os.environ["DS_ACCELERATOR"] = "cpu"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    ebft.run.training.check_machine = lambda *_: None
    arguments = ebft.run.training.training_kwargs
    ebft.run.training.training_kwargs = lambda *given: arguments(*given) | {"use_cpu": False}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_with_zero_train_as_one(trained, name):  # noqa: F811
    """ZeRO-3 is for SFT."""
    pytest.importorskip("deepspeed")
    one, two = trained(name, 1, **KEYS), trained(name, 2, on_cpu, deepspeed="zero2", **KEYS)
    assert_same(two, one)
    checkpoint = str(two[0] / "checkpoint-2")
    assert_same(trained(name, 2, on_cpu, deepspeed="zero2", resume_from_checkpoint=checkpoint, **KEYS), one)
    if name == "sft":
        assert_same(trained(name, 2, on_cpu, deepspeed="zero3", **KEYS), one)
