"""Starting NeMo Gym's servers together with training (`nemo_gym_auto_start`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebft.errors import ConfigError, ServerError
from ebft.nemo_gym.client import HOST, GymClient
from ebft.nemo_gym.keys import NemoGymKeys
from ebft.printed import say
from ebft.serving.log import ServerLog
from ebft.serving.server import end_supervisor

LOG = "nemo_gym.log"
DEFAULT_PORT = 11000  # of ng_run
_POLL = 0.2


@contextmanager
def started_servers(keys: NemoGymKeys, output_dir: str) -> Iterator[None]:
    """Start the servers, wait for the head server, and stop them at the end of the block.

    Nothing is started if a head server already responds, and on all processes except rank 0. Raises ConfigError if
    NeMo Gym is not installed, and ServerError, with the end of the log, if it exits or is not up in time.
    """
    if not (keys.nemo_gym_enabled and keys.nemo_gym_auto_start) or os.environ.get("RANK", "0") != "0":
        yield
        return
    client = GymClient(keys.nemo_gym_head_port, keys.nemo_gym_verify_timeout)
    try:
        if client.is_up():
            say(f"Using the NeMo Gym servers that run at {client.head}.", err=True)
            yield
            return
        log = ServerLog(Path(output_dir) / LOG)
        process = _launch(keys, log)
        try:
            _await_head(process, client, keys.nemo_gym_server_timeout, log)
            yield
        finally:
            end_supervisor(process)
    finally:
        client.close()


def start_command(keys: NemoGymKeys) -> list[str]:
    """The command that starts the servers. Raises ConfigError if NeMo Gym is not installed or no config is given."""
    program = Path(keys.nemo_gym_dir).expanduser() / ".venv" / "bin" / "ng_run"
    if not program.is_file():
        raise ConfigError(
            f"nemo_gym_auto_start: {program} does not exist. Install NeMo Gym in nemo_gym_dir (clone "
            "https://github.com/NVIDIA-NeMo/Gym and run `uv venv && uv sync` there), or start its servers yourself and "
            "set nemo_gym_auto_start: false."
        )
    if not keys.nemo_gym_config_paths:
        raise ConfigError(
            "nemo_gym_auto_start needs nemo_gym_config_paths, the configs of the servers to start. Set them, or start "
            "the servers yourself and set nemo_gym_auto_start: false."
        )
    command = [str(program), f"+config_paths=[{','.join(keys.nemo_gym_config_paths)}]", "+skip_venv_if_present=true"]
    if keys.nemo_gym_head_port != DEFAULT_PORT:
        command += [f"+head_server.host={HOST}", f"+head_server.port={keys.nemo_gym_head_port}"]
    return command


def _launch(keys: NemoGymKeys, log: ServerLog) -> subprocess.Popen:
    command = start_command(keys)
    with log.open(command) as file:
        return subprocess.Popen(
            [sys.executable, "-m", "ebft.serving.supervisor", "--", *command],
            cwd=Path(keys.nemo_gym_dir).expanduser(),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _await_head(process: subprocess.Popen, client: GymClient, timeout: float, log: ServerLog) -> None:
    deadline = time.monotonic() + timeout
    while not client.is_up():
        if process.poll() is not None:
            raise ServerError(f"ng_run exited before NeMo Gym was up (exit code {process.poll()}). {log.tail()}")
        if time.monotonic() > deadline:
            raise ServerError(
                f"NeMo Gym was not up at {client.head} within {timeout:g} s. Increase nemo_gym_server_timeout if it "
                f"needs more time. {log.tail()}"
            )
        time.sleep(_POLL)
