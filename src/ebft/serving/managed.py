"""The server of `vllm_mode: managed`: started when training starts, beside the trainer, and ended with it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebft.config.schema import RunConfig
from ebft.serving.command import server_command
from ebft.serving.devices import device_environment
from ebft.serving.interpreter import find_interpreter
from ebft.serving.server import DEFAULT_TIMEOUT, VLLMServer

LOG = "vllm.log"


@contextmanager
def managed_server(config: RunConfig, gpus: int, processes: int) -> Iterator[VLLMServer | None]:
    """The started server, not yet ready, on the GPUs that `processes` trainers leave free; it ends with the block.

    None where the config asks for none, and on all processes but the first of several.
    """
    managed = config.uses_server and config.trl.vllm_mode == "managed"
    if not managed or os.environ.get("RANK", "0") != "0":
        yield None
        return
    environment = device_environment(config, processes, gpus)
    command = server_command(config, find_interpreter(config), gpus)
    with VLLMServer(command, Path(config.output_dir) / LOG, environment) as server:
        yield server


def await_ready(server: VLLMServer | None, config: RunConfig) -> None:
    """Wait for the server to be ready, and have it started again from then on whenever it dies."""
    if server is not None:
        server.wait_until_healthy(config.trl.vllm_server_timeout or DEFAULT_TIMEOUT)
        server.watch()
