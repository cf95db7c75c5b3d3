"""The commands of the launchers: accelerate's and torchrun, of the packages of this Python."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ebft.launch.plan import ACCELERATE, PORT, RAY, Plan

NEUTRAL = Path(__file__).with_name("accelerate.yaml")
THREADS = "OMP_NUM_THREADS"
MODULES = {"accelerate": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}
PROGRAM = "ebft.cli"  # the module that each process runs
_LOCAL = "127.0.0.1"


def launcher_arguments(plan: Plan, words: Sequence[str]) -> list[str]:
    """The arguments of the plan's launcher that start `ebft WORDS` in each process."""
    return [*own_options(plan), *plan.options.passed_on, "--module", PROGRAM, *words]


def own_options(plan: Plan) -> list[str]:
    """The options of the plan's launcher that follow from the options of `ebft train`."""
    return (_accelerate if plan.launcher == ACCELERATE else _torchrun)(plan)


def environment(plan: Plan) -> dict[str, str]:
    """Variables for the launcher: on CPU, the threads of a process, so that all together use each core once."""
    if plan.gpus or THREADS in os.environ:
        return {}
    return {THREADS: str(max(1, (os.cpu_count() or 1) // plan.per_machine))}


def command_line(plan: Plan, words: Sequence[str]) -> str:
    """The command for a shell that starts the same processes."""
    if plan.launcher in (None, RAY):
        own = shlex.join([sys.executable, "-m", "ebft.cli", *words])
        return own if plan.launcher is None else f"# {plan.note}\n{own}"  # no other command starts Ray's workers
    variables = [f"{name}={value}" for name, value in environment(plan).items()]
    return " ".join(
        [*variables, shlex.join([sys.executable, "-m", MODULES[plan.launcher], *launcher_arguments(plan, words)])]
    )


def _accelerate(plan: Plan) -> list[str]:
    options = plan.options
    own_file = any(word.partition("=")[0] in ("--config_file", "--config-file") for word in options.passed_on)
    words = [] if own_file else ["--config_file", str(NEUTRAL)]
    words += ["--num_processes", str(plan.processes), "--num_machines", str(options.machines)]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    if plan.processes > 1:
        words.append("--multi_gpu")  # the only way of accelerate's launcher to start processes without MPI, also on CPU
    if options.machines > 1:
        words += ["--machine_rank", str(options.machine_rank), "--same_network"]
        words += ["--main_process_ip", options.main_process_ip]
        return [*words, "--main_process_port", str(options.main_process_port or PORT)]
    return [*words, "--main_process_port", str(options.main_process_port or 0)]  # 0: a free one


def _torchrun(plan: Plan) -> list[str]:
    options = plan.options
    words = ["--nproc-per-node", str(plan.per_machine)]
    if options.machines > 1:
        words += ["--nnodes", str(options.machines), "--node-rank", str(options.machine_rank)]
        words += ["--master-addr", options.main_process_ip]
        return [*words, "--master-port", str(options.main_process_port or PORT)]
    if options.main_process_port is not None:
        return [*words, "--master-addr", _LOCAL, "--master-port", str(options.main_process_port)]
    return [*words, "--standalone", "--local-addr", _LOCAL]  # with a free port
