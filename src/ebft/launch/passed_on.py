"""The options after --: they are read by the launcher's parser, and must not change what `ebft train` decides."""

from __future__ import annotations

import contextlib
import io
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from ebft.errors import ConfigError
from ebft.launch.command import MODULES, PROGRAM, own_options
from ebft.launch.plan import ACCELERATE, Plan

_PROCESSES, _MACHINES, _RANK = "use --num-processes before --", "use --num-machines", "use --machine-rank"
_ADDRESS, _PORT = "use --main-process-ip", "use --main-process-port"
_PYTHON = "training runs as a module of this Python"
# Options of the launchers that `ebft train` sets, or that would replace keys of the config, and what sets them.
_OURS = {
    ACCELERATE: {
        "num_processes": _PROCESSES,
        "num_machines": _MACHINES,
        "machine_rank": _RANK,
        "main_process_ip": _ADDRESS,
        "main_process_port": _PORT,
        "mixed_precision": "set bf16 or fp16 in the config",
        "dynamo_backend": "set torch_compile in the config",
        "use_deepspeed": "set deepspeed in the config",
        "use_fsdp": "set fsdp in the config",
        "no_python": _PYTHON,
    },
    "torchrun": {
        "nproc_per_node": _PROCESSES,
        "nnodes": _MACHINES,
        "node_rank": _RANK,
        "master_addr": _ADDRESS,
        "master_port": _PORT,
        "no_python": _PYTHON,
        "run_path": _PYTHON,
    },
}
_MAY_REPEAT = ("config_file", "module", "training_script", "training_script_args")


class _Recording(Namespace):
    """Arguments that remember which of them a parser has changed."""

    def __init__(self, defaults: Namespace) -> None:
        vars(self).update(vars(defaults), were_set=set())

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not vars(self).get(name):  # argparse sets defaults that are text again
            self.were_set.add(name)
        super().__setattr__(name, value)


def parsed_arguments(launcher: str, arguments: Sequence[str], into: Namespace | None = None) -> Namespace:
    """The arguments, read by the launcher's parser. Raises ConfigError if it does not accept them."""
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written), contextlib.redirect_stdout(written):
            return _parser(launcher).parse_args(arguments, into)
    except SystemExit as error:  # of argparse, which has written its usage and the problem, or its help
        if not error.code:
            raise ConfigError(
                f"Options after --: {launcher} would print its help instead of starting processes. For its options, "
                f"run python -m {MODULES[launcher]} --help."
            ) from None
        problem = written.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(f"Options after --: {launcher} does not accept them: {problem}.") from None


def check_passed_on(plan: Plan) -> None:
    """Raise ConfigError for words after -- that are no options of the plan's launcher, or that `ebft train` sets."""
    own = _read(plan, own_options(plan)).were_set
    passed_on = _read(plan, plan.options.passed_on)
    if (passed_on.training_script, passed_on.training_script_args) != (PROGRAM, []):
        raise ConfigError(
            f"Options after --: {passed_on.training_script!r:.100} is not an option of {plan.launcher}, or the value "
            "of one. Remove it; overrides of the config are written before --."
        )
    ours = _OURS[plan.launcher] | {name: "remove it" for name in own if name not in _OURS[plan.launcher]}
    for name in sorted(passed_on.were_set):
        if name in ours and name not in _MAY_REPEAT:
            raise ConfigError(
                f"Options after --: ebft train sets --{name} of {plan.launcher} itself, so it cannot be passed on: "
                f"{ours[name]}."
            )


def _read(plan: Plan, options: Sequence[str]) -> _Recording:
    """The options by their names in the parser, in which all spellings are one."""
    program = ["--module", PROGRAM]
    found = _Recording(parsed_arguments(plan.launcher, program))
    parsed_arguments(plan.launcher, [*options, *program], found)
    return found


def _parser(launcher: str) -> ArgumentParser:
    if launcher == ACCELERATE:
        from accelerate.commands.launch import launch_command_parser

        return launch_command_parser()
    from torch.distributed.run import get_args_parser

    return get_args_parser()
