"""What a run needs to know about the machine that it takes place on, and what a config asks of it in vain."""

from dataclasses import dataclass

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """Accelerators, processes, and the names of the devices that tensors can be on."""

    has_accelerator: bool
    supports_bf16: bool
    processes: int = 1
    devices: tuple[str, ...] = ("cpu",)


def check_machine(config: RunConfig, machine: Machine) -> None:
    """Refuse what this machine would ignore or stumble over later; ConfigError says what to do instead."""
    if config.fsdp and not machine.has_accelerator:
        raise ConfigError("fsdp needs GPUs and there is none here. Remove fsdp: several processes on a CPU use DDP.")
    if config.fsdp and machine.processes == 1:
        raise ConfigError(
            "fsdp shards the model over several processes, but one runs. Launch several, for example torchrun "
            "--nproc-per-node 2 -m ebft.cli train CONFIG, or remove fsdp."
        )
    if config.fp16 and not machine.has_accelerator:
        raise ConfigError("fp16: true needs a GPU and there is none here. Remove it, or set bf16: true.")
    for problem in config.method.problems_here(config, machine):
        raise ConfigError(problem)
