"""The number of processes of a run and how they are started, from the options of `ebft train` and the machine."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ebft.errors import ConfigError
from ebft.machine import is_launched
from ebft.run.config.schema import RunConfig
from ebft.serving.command import server_gpus

ACCELERATE, TORCHRUN, PYTHON = "accelerate", "torchrun", "python"
RAY = "ray"  # the launcher of a plan with use_ray: true, which is not an option
RAY_ADDRESS = "RAY_ADDRESS"  # environment variable: the Ray cluster that the command connects to
PORT = 29500  # the default of accelerate and torchrun for several machines
_ONE_GPU = re.compile(r"\w+:\d+")  # a feature_device that names one GPU


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `ebft train`; None is unset. `num_processes` is on all machines, `passed_on` for the launcher."""

    launcher: str | None = None
    num_processes: int | None = None
    num_machines: int | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    passed_on: tuple[str, ...] = ()

    @property
    def machines(self) -> int:
        return self.num_machines or 1

    def words(self) -> list[str]:
        """The options as words of a command, with those for the launcher last."""
        named = {f"--{name.replace('_', '-')}": value for name, value in vars(self).items() if name != "passed_on"}
        given = [word for name, value in named.items() if value is not None for word in (name, str(value))]
        return [*given, *(["--", *self.passed_on] if self.passed_on else [])]


@dataclass(frozen=True)
class Plan:
    """How a run is started, in this process without a launcher; `processes` on all machines, `note` for the user."""

    options: LaunchOptions
    launcher: str | None
    processes: int
    gpus: int
    note: str = ""

    @property
    def per_machine(self) -> int:
        return self.processes // self.options.machines


def plan_launch(options: LaunchOptions, config: RunConfig) -> Plan:
    """Decide how a run is started. Raises ConfigError for options that contradict each other or the machine."""
    if config.use_ray:
        return _ray_plan(options, config)
    is_one = is_launched() or options.launcher == PYTHON
    gpus = 0 if is_one else visible_gpus()
    processes, reason = (options.num_processes, "") if options.num_processes else _automatic(options, config, gpus)
    if problem := next(_problems(options, processes), None):
        raise ConfigError(problem)
    if is_one:
        return Plan(options, None, 1, 0)
    if processes == 1 and options.launcher is None and not options.passed_on:
        return Plan(options, None, 1, gpus, f"Training in one process on one of {gpus} GPUs{reason}." if reason else "")
    plan = Plan(options, options.launcher or ACCELERATE, processes, gpus)
    count = f"{plan.per_machine} process{'es' if plan.per_machine > 1 else ''}"
    rank = f" on machine {options.machine_rank} of {options.machines} (counted from 0)"
    machine = rank if options.machines > 1 else ""
    where = " on CPU" if not gpus else f" on {plan.per_machine} of {gpus} GPUs"
    if plan.per_machine == gpus > 1:
        where = ", one per GPU"
    one = "" if options.num_processes or options.launcher else " --launcher python trains in one process."
    return replace(plan, note=f"Starting {count} with {plan.launcher}{machine}{where}{reason}.{one}")


# Options of launchers that `ebft train` sets, or that would replace keys of the config.
_OURS = {
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "multi_gpu"),
    *("mixed_precision", "dynamo_backend", "use_deepspeed", "use_fsdp", "nproc_per_node", "nnodes", "node_rank"),
    *("master_addr", "master_port", "standalone", "local_addr", "no_python", "run_path", "module"),
}


def _problems(options: LaunchOptions, processes: int) -> Iterator[str]:
    machines, rank, given = options.machines, options.machine_rank, options.words()
    if machines == 1 and (rank or options.main_process_ip):  # rank 0 is the only machine
        yield "--machine-rank and --main-process-ip are for several machines. Set --num-machines."
    if machines > 1 and not (options.main_process_ip and rank is not None and 0 <= rank < machines):
        needed = f"--machine-rank, 0 to {machines - 1}, another one on each machine, and --main-process-ip"
        yield f"--num-machines {machines} requires {needed}, the address of the machine with rank 0."
    if is_launched() and given:
        yield "A launcher started this process (LOCAL_RANK or WORLD_SIZE is set): give it the options of a launch."
    elif options.launcher == PYTHON and given[2:] not in ([], ["--num-processes", "1"]):
        yield "--launcher python trains in one process, so the other options of a launch have no effect. Remove them."
    names = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in options.passed_on if word[:1] == "-"}
    if ours := sorted(names & _OURS):
        yield f"--{ours[0]} after --: ebft train sets it. Use its own option before --, or the key of the config."
    if processes % machines:
        yield f"--num-processes {processes}, on all machines together, must be a multiple of --num-machines {machines}."


def visible_gpus() -> int:
    """The number of GPUs, or of other accelerators, that this process may use."""
    import torch  # slow, and not needed for help and errors of options

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _ray_plan(options: LaunchOptions, config: RunConfig) -> Plan:
    """The plan of a run with use_ray: true."""
    refused = "This process was started by a launcher" if is_launched() else next(iter(options.words()), "")
    if refused:
        raise ConfigError(f"use_ray: true starts Ray workers itself, by ray_num_workers. Remove: {refused}.")
    workers, resources = config.ray_num_workers, config.resources_per_worker
    each = "one GPU each, or one CPU if Ray has no GPUs"
    if resources is not None:
        each = f"{', '.join(f'{name}: {amount:g}' for name, amount in resources.items()) or 'nothing reserved'} each"
    where = f"the cluster at {os.environ[RAY_ADDRESS]}" if uses_cluster() else "a local Ray"
    note = f"Starting {workers} worker{'s' if workers > 1 else ''} with Ray Train on {where} ({each})."
    return Plan(options, RAY, workers, 0, note)


def uses_cluster() -> bool:
    """Whether RAY_ADDRESS names a cluster, so that no local Ray is started."""
    return os.environ.get(RAY_ADDRESS, "") not in ("", "local")


def _automatic(options: LaunchOptions, config: RunConfig, gpus: int) -> tuple[int, str]:
    """The number of processes if none is given, and the reason if it is not one per GPU."""
    here, reason = max(gpus, 1), ""
    if gpus > 1 and config.ddp is False:
        here, reason = 1, ", because of ddp: false"
    elif gpus > 1 and _ONE_GPU.fullmatch(device := config.ebft.feature_device or ""):
        here = 1
        reason = f", because ebft.feature_device: {device} is one GPU; --num-processes starts several processes"
    elif gpus > 1 and config.manages_server:
        here = max(1, gpus - server_gpus(config.server_settings.vllm, gpus))
        reason = "; the others are for the vLLM server" if here < gpus else ""
    return here * options.machines, reason
