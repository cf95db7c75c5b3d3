"""Modules that run in one or several processes, with the environment that torchrun would give them."""
# The processes are forked from one that has imported what they need, since those of torchrun take six seconds each.

import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from tests.serving.processes import free_port

_SERVER = multiprocessing.get_context("forkserver")
OURS = ["ebft.preferences.trainers", "ebft.run.training", "ebft.sft.trainer", "ebft.strided", "ebft.structured"]
_SERVER.set_forkserver_preload(["peft", "transformers.trainer", "trl", *OURS])
_LIMIT = 300.0  # seconds
_STACKS = signal.SIGUSR1


def run_module(module: str, processes: int, *arguments: str) -> None:
    """Run `module` as `__main__` with these arguments in each process; the output of one that fails is in the error."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs, started = [Path(folder, str(rank)) for rank in range(processes)], []
        for rank, log in enumerate(logs):
            environment = environment_of(rank, processes, port)
            started.append(_SERVER.Process(target=_main, args=(module, arguments, environment, log)))
            started[-1].start()
        codes = exit_codes(started)
        assert codes == [0] * processes, f"exit codes {codes}\n" + "\n".join(log.read_text()[-3000:] for log in logs)


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells one of `count` processes; nothing if it is the only one."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (ranks | address).items()} if count > 1 else {}


def exit_codes(started: list[Any]) -> list[int]:
    """Wait for processes that called `print_stacks_at_signal`; one that takes too long prints its stacks and is killed.
    Of a forked process, faulthandler.dump_traceback_later can wait for a thread that the fork did not take along."""
    end = time.monotonic() + _LIMIT
    for process in started:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            os.kill(process.pid, _STACKS)
            process.join(2.0)
            process.kill()
            process.join()
    return [process.exitcode for process in started]


def print_stacks_at_signal(output: TextIO) -> None:
    faulthandler.register(_STACKS, file=output, all_threads=True)


def _main(module: str, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
    """The whole life of a process."""
    output = log.open("w", buffering=1)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    print_stacks_at_signal(output)
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)
