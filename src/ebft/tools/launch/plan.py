"""The number of processes of a run and how they are started, from the options of `ebft train` and the machine."""

import difflib
import os
import re
from dataclasses import astuple, dataclass
from importlib.util import find_spec

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError, MissingPackageError
from ebft.processes import is_launched
from ebft.serving.command import server_gpus

ACCELERATE, TORCHRUN, PYTHON = "accelerate", "torchrun", "python"
LAUNCHERS = (ACCELERATE, TORCHRUN, PYTHON)
RAY = "ray"  # the launcher of a plan with use_ray: true, which is not an option
RAY_ADDRESS = "RAY_ADDRESS"  # environment variable: the Ray cluster that the command connects to
PORT = 29500  # the default of accelerate and torchrun for several machines
_MOST = 4096  # processes on one machine
_ONE_GPU = re.compile(r"\w+:\d+")  # a feature_device that names one GPU


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `ebft train`; None is unset. `num_processes` counts those of all machines.

    `passed_on` are the options for the launcher.
    """

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

    @property
    def is_given(self) -> bool:
        """Whether any option is given."""
        return any(value not in (None, ()) for value in astuple(self))

    def words(self) -> list[str]:
        """The options as words of a command, with those for the launcher last."""
        named = {f"--{name.replace('_', '-')}": value for name, value in vars(self).items() if name != "passed_on"}
        given = [word for name, value in named.items() if value is not None for word in (name, str(value))]
        return [*given, *(["--", *self.passed_on] if self.passed_on else [])]


@dataclass(frozen=True)
class Plan:
    """How a run is started. Without a launcher, it is one process, which is this one.

    `processes` counts those of all machines, `per_machine` those of this one; `note` is a line for the user, or empty.
    """

    options: LaunchOptions
    launcher: str | None
    processes: int
    gpus: int
    note: str = ""

    @property
    def per_machine(self) -> int:
        return self.processes // self.options.machines


def plan_launch(options: LaunchOptions, config: RunConfig) -> Plan:
    """Decide how a run is started. Raises ConfigError for options that contradict each other or the machine.

    Without options, a process that a launcher started, or one on a machine without several GPUs, trains itself.
    """
    _check_launcher(options.launcher)
    if config.use_ray:
        return _ray_plan(options, config)
    _check_machines(options)
    if is_launched():
        if options.is_given:
            raise ConfigError(
                "This process was started by a launcher (LOCAL_RANK or WORLD_SIZE is set), so the options of a launch "
                "cannot be used here. Give them to that launcher, or unset these variables."
            )
        return Plan(options, None, 1, 0)
    if options.launcher == PYTHON:
        _check_one_process(options)
        return Plan(options, None, 1, 0)
    gpus = visible_gpus()
    processes, reason = (options.num_processes, "") if options.num_processes else _automatic(options, config, gpus)
    _check_count(processes, options, gpus)
    if processes == 1 and options.launcher is None:
        if options.passed_on:
            raise ConfigError(
                "The options after -- are for a launcher, but one process runs without one. Set --num-processes or "
                "--launcher, or remove them."
            )
        return Plan(options, None, 1, gpus, f"Training in one process on one of {gpus} GPUs{reason}." if reason else "")
    plan = Plan(options, options.launcher or ACCELERATE, processes, gpus)
    return Plan(options, plan.launcher, processes, gpus, _note(plan, reason))


def visible_gpus() -> int:
    """The number of GPUs, or of other accelerators, that this process may use."""
    import torch  # slow, and not needed for help and errors of options

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _ray_plan(options: LaunchOptions, config: RunConfig) -> Plan:
    """The plan of a run with use_ray: true."""
    if is_launched():
        raise ConfigError(
            "use_ray: true starts the workers itself, but this process was started by a launcher (LOCAL_RANK or "
            "WORLD_SIZE is set). Run ebft train without the launcher, or set use_ray: false."
        )
    if options.is_given:
        raise ConfigError(
            f"use_ray: true starts Ray workers, so {options.words()[0]} cannot be used. Set ray_num_workers and "
            "resources_per_worker, or use_ray: false."
        )
    if not has_ray():
        raise MissingPackageError("use_ray requires the package ray: pip install 'ebft[ray]'")
    if os.environ.get(RAY_ADDRESS, "").startswith("ray://"):  # the driver is not part of the cluster
        raise ConfigError(
            f"{RAY_ADDRESS}: use_ray does not support Ray Client (ray://). Run the command on a machine of the "
            "cluster, for example with ray job submit."
        )
    workers, resources = config.ray_num_workers, config.resources_per_worker
    each = "one GPU each, or one CPU if Ray has no GPUs"
    if resources is not None:
        each = f"{', '.join(f'{name}: {amount:g}' for name, amount in resources.items()) or 'nothing reserved'} each"
    where = f"the cluster at {os.environ[RAY_ADDRESS]}" if uses_cluster() else "a local Ray"
    note = f"Starting {workers} worker{'s' if workers > 1 else ''} with Ray Train on {where} ({each})."
    return Plan(options, RAY, workers, 0, note)


def has_ray() -> bool:
    """Whether the package ray is installed."""
    return find_spec("ray") is not None


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


def _note(plan: Plan, reason: str) -> str:
    options = plan.options
    count = f"{plan.per_machine} process{'es' if plan.per_machine > 1 else ''}"
    rank = f" on machine {options.machine_rank} of {options.machines} (counted from 0)"
    machine = rank if options.machines > 1 else ""
    where = " on CPU" if not plan.gpus else f" on {plan.per_machine} of {plan.gpus} GPUs"
    if plan.per_machine == plan.gpus > 1:
        where = ", one per GPU"
    one = "" if options.num_processes or options.launcher else " --launcher python trains in one process."
    return f"Starting {count} with {plan.launcher}{machine}{where}{reason}.{one}"


def _check_launcher(name: str | None) -> None:
    if name is None or name in LAUNCHERS:
        return
    if name.lower() == RAY:
        raise ConfigError("--launcher ray: Ray Train is selected in the config. Set use_ray=true.")
    near = difflib.get_close_matches(name.lower(), LAUNCHERS, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(LAUNCHERS)}."
    raise ConfigError(f"--launcher: unknown launcher {name!r:.100}. {hint}")


def _check_machines(options: LaunchOptions) -> None:
    for name in ("num_processes", "num_machines"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected at least 1.")
    port = options.main_process_port
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"--main-process-port {port}: expected a port from 1 to 65535.")
    machines, rank = options.machines, options.machine_rank
    if machines == 1:
        for name, value in (("--machine-rank", rank), ("--main-process-ip", options.main_process_ip)):
            if value:  # rank 0 is the only machine
                raise ConfigError(f"{name} is for several machines. Set --num-machines, or remove it.")
        return
    if not (options.main_process_ip or "").strip():
        raise ConfigError(
            f"--num-machines {machines} requires --main-process-ip: the address of the machine with --machine-rank 0, "
            "the same on every machine."
        )
    if rank is None:
        raise ConfigError(f"--num-machines {machines} requires --machine-rank: 0 to {machines - 1}, one per machine.")
    if not 0 <= rank < machines:
        raise ConfigError(f"--machine-rank {rank} is out of range: expected 0 to {machines - 1} (--num-machines).")


def _check_one_process(options: LaunchOptions) -> None:
    contradictions = {
        f"--num-processes {options.num_processes}": (options.num_processes or 1) > 1,
        f"--num-machines {options.machines}": options.machines > 1,
        "--main-process-port": options.main_process_port is not None,
        "options for a launcher after --": options.passed_on,
    }
    for problem, is_given in contradictions.items():
        if is_given:
            raise ConfigError(
                f"--launcher python trains in one process, without a launcher, which contradicts {problem}. Use "
                "--launcher accelerate or torchrun, or remove one of them."
            )


def _check_count(processes: int, options: LaunchOptions, gpus: int) -> None:
    machines = options.machines
    if processes % machines:
        raise ConfigError(
            f"--num-processes {processes} is the number on all machines together, so it must be a multiple of "
            f"--num-machines {machines}. Use {max(1, processes // machines) * machines}."
        )
    here = processes // machines
    if here > _MOST:
        raise ConfigError(f"--num-processes {processes}: one machine can run at most {_MOST} processes.")
    if 0 < gpus < here:
        each = "" if machines == 1 else f" ({here} per machine)"
        raise ConfigError(
            f"--num-processes {processes}{each} exceeds the number of visible GPUs, {gpus}. Use at most "
            f"{gpus * machines}, or make more GPUs visible (CUDA_VISIBLE_DEVICES)."
        )
