"""Running a launcher in this process, which passes signals on to the processes it started and ends with their status.

Launchers give their processes 30 seconds to end after a signal, which is not enough for a step and a checkpoint, and
end with a traceback of their own. Here, the launcher runs in a thread, in which torch installs no signal handlers, and
the main thread sends each signal to the processes and waits for as long as they need.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, NoReturn

from ebft import machine
from ebft.errors import ConfigError, LaunchError, cause, doing
from ebft.printed import say
from ebft.tools.launch.plan import ACCELERATE, PORT, RAY, Plan

_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_KILLING = 3  # so many times Ctrl-C kills processes that do not end
_STARTUP = 10.0  # seconds after a signal in which processes that are starting still report their ids
_SAME_TIME = 5  # seconds between a process that is killed and the errors of others that follow from it
_POLL = 0.1  # seconds


def launch(plan: Plan, words: Sequence[str]) -> int:
    """Run `ebft WORDS` in the processes of the plan on this machine; returns their exit status, 128 + n for a signal n.

    Raises LaunchError if they cannot be started or one was killed, ConfigError for options that the launcher does not
    accept, KeyboardInterrupt if a signal arrives before they have started.
    """
    parsed = parsed_arguments(plan.launcher, launcher_arguments(plan, words))
    store = _own_store(plan, parsed)  # noqa: F841 (it is open as long as this variable)
    if plan.launcher == ACCELERATE:
        from accelerate.commands.launch import launch_command as run
    else:
        from torch.distributed.run import run
    with tempfile.TemporaryDirectory(prefix="ebft-launch-", ignore_cleanup_errors=True) as created:
        folder = Path(created)
        command = machine.typed_command(["ebft", *words, *plan.options.words()])
        (folder / machine.COMMAND_FILE).write_text(json.dumps(command), encoding="utf-8")
        of_launch = {machine.LAUNCH_FOLDER: created, machine.LAUNCH_PARENT: str(os.getpid())}
        variables = launcher_environment(plan) | of_launch
        os.environ |= variables  # new processes get them, too
        logging.disable(logging.ERROR)  # of launchers: the processes report their errors, and this command the rest
        try:
            with machine.received_signals() as received:
                ended = _run(lambda: run(parsed), folder, received)
            return _status(ended, folder, bool(received))
        finally:
            logging.disable(logging.NOTSET)
            for name in variables:
                os.environ.pop(name, None)


def _own_store(plan: Plan, parsed: Namespace) -> Any:
    """The store at which processes of one machine meet, by its port; launchers open theirs on all addresses."""
    if plan.options.machines > 1 or sys.platform != "linux":  # others have no second address
        return None
    from torch.distributed import TCPStore

    with doing("opening --main-process-port"):
        listening = socket.create_server((_OWN, plan.options.main_process_port or 0))
    port = listening.getsockname()[1]
    parsed.rdzv_backend, parsed.standalone, parsed.master_addr = "static", False, _OWN
    parsed.master_port = parsed.main_process_port = port
    options = {"multi_tenant": True, "wait_for_workers": False, "use_libuv": False}
    return TCPStore(_OWN, port, is_master=True, master_listen_fd=listening.detach(), **options)


def in_thread(start: Callable[[], Any], look: Callable[[], None]) -> Any:
    """What `start` returns or raises in a thread, in which libraries handle no signals; `look` is called often."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(start())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, name="launcher", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL)
        look()
    return ended[0]


def _run(start: Callable[[], None], folder: Path, received: list[int]) -> BaseException | None:
    """Run the launcher in a thread, and send what is in `received` to its processes; returns its exception, if any."""
    sent: dict[int, int] = {}
    arrived: list[float] = []

    def look() -> None:
        if received:
            arrived.append(time.monotonic())
            _forward(received, folder, sent)
            if not sent and arrived[-1] - arrived[0] > _STARTUP:  # for example, it still waits for other machines
                raise KeyboardInterrupt("Interrupted before training started; nothing was saved.")

    return in_thread(start, look)


def _forward(received: list[int], folder: Path, sent: dict[int, int]) -> None:
    """Send each process the signals that it has not been sent yet; `sent` counts them by process."""
    for path in folder.glob("*.pid"):
        text = path.read_text()
        if not text.isdigit():  # it is being written
            continue
        pid = int(text)
        new = received[sent.get(pid, 0) :]
        sent[pid] = len(received)
        for number in new:
            kills = received.count(signal.SIGINT) >= _KILLING
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kills else machine.passed_on(number))


def _status(error: BaseException | None, folder: Path, was_signalled: bool) -> int:
    """The exit status of the processes, from how the launcher ended; prints the traceback that a process left."""
    if error is None:
        return 0
    if isinstance(error, CalledProcessError):  # of accelerate, for one process
        code, who = error.returncode, "The process"
    else:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if not isinstance(error, ChildFailedError):
            raise LaunchError(f"The processes cannot be started: {cause(error)}") from error
        # Others fail because of a process that was killed, and the launcher stops or, later, kills them.
        latest = min(failure.timestamp for failure in error.failures.values()) + _SAME_TIME
        was_killed = lambda one: one.exitcode < 0 and -one.exitcode not in machine.SIGNALS and one.timestamp <= latest
        rank, first = max(error.failures.items(), key=lambda item: (was_killed(item[1]), item[1].exitcode > 0))
        code = first.exitcode
        who = f"The process of rank {rank}"
    if code < 0 and was_signalled and -code in (*machine.SIGNALS, signal.SIGKILL):
        return 128 - code
    if code < 0:
        reason = ", for example because memory ran out" if -code == signal.SIGKILL else ""
        raise LaunchError(f"{who} was killed by {signal.Signals(-code).name}{reason}.", status=128 - code)
    message, failed = folder / machine.ERROR_FILE, folder / machine.FAILED_FILE
    if message.exists():
        say(f"\nThe process of rank {failed.read_text()} failed:\n{message.read_text(encoding='utf-8')}", err=True)
    elif not failed.exists() and code not in _INTERRUPTED:
        raise LaunchError(f"{who} ended with exit status {code}.", status=code)
    return code


NEUTRAL = Path(__file__).with_name("accelerate.yaml")
THREADS = "OMP_NUM_THREADS"
MODULES = {"accelerate": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}
PROGRAM = "ebft"  # the module that each process runs
_LOCAL = "127.0.0.1"
_OWN = "127.0.0.2"  # accelerate refuses a port that is open on 127.0.0.1


def launcher_arguments(plan: Plan, words: Sequence[str]) -> list[str]:
    """The arguments of the plan's launcher that start `ebft WORDS` in each process."""
    own = (_accelerate if plan.launcher == ACCELERATE else _torchrun)(plan)
    return [*own, *plan.options.passed_on, "--module", PROGRAM, *words]


def launcher_environment(plan: Plan) -> dict[str, str]:
    """Variables for the launcher: on CPU, the threads of a process, so that all together use each core once."""
    if plan.gpus or THREADS in os.environ:
        return {}
    return {THREADS: str(max(1, (os.cpu_count() or 1) // plan.per_machine))}


def shell_command(plan: Plan, words: Sequence[str]) -> str:
    """The command for a shell that starts the same processes."""
    if plan.launcher in (None, RAY):
        own = shlex.join([sys.executable, "-m", "ebft", *words])
        return own if plan.launcher is None else f"# {plan.note}\n{own}"  # no other command starts Ray's workers
    variables = [f"{name}={value}" for name, value in launcher_environment(plan).items()]
    command = [sys.executable, "-m", MODULES[plan.launcher], *launcher_arguments(plan, words)]
    return " ".join([*variables, shlex.join(command)])


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


def parsed_arguments(launcher: str, arguments: Sequence[str]) -> Namespace:
    """The arguments, read by the launcher's parser. Raises ConfigError if it does not accept them."""

    def refuse(problem: str) -> NoReturn:
        raise ConfigError(f"Options after --: {launcher} does not accept them: {problem}.")

    if launcher == ACCELERATE:
        from accelerate.commands.launch import launch_command_parser as parser_of
    else:
        from torch.distributed.run import get_args_parser as parser_of
    parser = parser_of()
    parser.error, parser.exit = refuse, lambda *_: refuse("it would print its help")
    return parser.parse_args(arguments)
