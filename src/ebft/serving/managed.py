"""The server of `vllm_mode: managed`, which is started and stopped together with the training process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebft.serving.command import server_command
from ebft.serving.devices import device_environment
from ebft.serving.interpreter import find_interpreter
from ebft.serving.keys import ServerSettings
from ebft.serving.server import DEFAULT_TIMEOUT, VLLMServer

LOG = "vllm.log"


@contextmanager
def managed_server(
    settings: ServerSettings | None, output_dir: str, gpus: int, processes: int
) -> Iterator[VLLMServer | None]:
    """Start the server on the GPUs not used by the `processes` trainer processes, and stop it at the end of the block.

    The server is not ready yet when the block starts. Yields None without settings, and on all processes except rank 0.
    """
    if settings is None or os.environ.get("RANK", "0") != "0":
        yield None
        return
    environment = device_environment(settings.vllm, processes, gpus)
    command = server_command(settings, find_interpreter(settings.vllm.python), gpus)
    with VLLMServer(command, Path(output_dir) / LOG, environment) as server:
        yield server


def await_ready(server: VLLMServer | None, timeout: float | None) -> None:
    """Wait until the server is ready, and restart it from then on if it exits."""
    if server is not None:
        server.wait_until_healthy(timeout or DEFAULT_TIMEOUT)
        server.watch()
