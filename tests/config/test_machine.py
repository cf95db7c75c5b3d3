import warnings
from dataclasses import replace

import pytest

from ebft.errors import ConfigError
from ebft.run.checks import Machine, check_machine

CPU = Machine(has_accelerator=False, supports_bf16=False)
GPU = Machine(has_accelerator=True, supports_bf16=True, devices=("cpu", "cuda", "cuda:0"))


def strided(device):
    return {"rl": "ebft", "ebft": {"mode": "strided", "feature_device": device}}


@pytest.mark.parametrize(("machine", "keys", "message"), [
    (CPU, {"fsdp": ["full_shard", "offload"]}, "cannot be offloaded to the CPU in a run on CPU"),
    (CPU, {"deepspeed": "zero2"}, "deepspeed requires GPUs: on CPU, accelerate lets each process train on all"),
    (GPU, {"fsdp": ["full_shard"]}, "but only one runs. Start several"),
    (CPU, {"fp16": True, "bf16": False}, "fp16: true requires a GPU"),
    (CPU, strided("cuda:7"), "'cuda:7' is unavailable. Choose from cpu, or remove it"),
    (GPU, strided("banana"), "Choose from cpu, cuda, cuda:0"),
])  # fmt: skip
def test_what_the_machine_lacks_is_refused(make, machine, keys, message):
    with pytest.raises(ConfigError, match=message):
        check_machine(make(**keys), machine)


def test_sharding_on_cpu_gives_a_warning(make):
    with pytest.warns(UserWarning, match="fsdp on CPU is slow"):
        check_machine(make(fsdp=True), Machine(has_accelerator=False, supports_bf16=False, processes=2))


def test_tf32_without_its_hardware_has_no_effect(make):
    with pytest.warns(UserWarning, match="tf32: true has no effect: it requires an Ampere or newer GPU"):
        check_machine(make(tf32=True), GPU)
    with warnings.catch_warnings(action="error"):
        check_machine(make(tf32=True), replace(GPU, supports_tf32=True))
        check_machine(make(fp16=True, bf16=False, **strided("cuda:0")), GPU)
