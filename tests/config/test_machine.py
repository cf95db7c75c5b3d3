import pytest

from ebft.errors import ConfigError
from ebft.run.checks import Machine, check_machine

CPU = Machine(has_accelerator=False, supports_bf16=False)
GPU = Machine(has_accelerator=True, supports_bf16=True, devices=("cpu", "cuda", "cuda:0"))


def strided(device):
    return {"rl": "ebft", "ebft": {"mode": "strided", "feature_device": device}}


@pytest.mark.parametrize(
    ("machine", "keys", "message"),
    [
        (CPU, {"fsdp": True}, "fsdp requires GPUs"),
        (GPU, {"fsdp": ["full_shard"]}, "but only one runs. Launch several"),
        (CPU, {"fp16": True, "bf16": False}, "fp16: true requires a GPU"),
        (CPU, strided("cuda:7"), "'cuda:7' is unavailable. Choose from cpu, or remove it"),
        (GPU, strided("banana"), "Choose from cpu, cuda, cuda:0"),
    ],
)
def test_what_the_machine_lacks_is_refused(make, machine, keys, message):
    with pytest.raises(ConfigError, match=message):
        check_machine(make(**keys), machine)


def test_what_is_there_may_be_used(make):
    check_machine(make(fp16=True, bf16=False, **strided("cuda:0")), GPU)
