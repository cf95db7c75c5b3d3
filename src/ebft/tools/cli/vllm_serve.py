"""`ebft vllm-serve CONFIG [key=value ...]`."""

import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ebft.config.load import load_config
from ebft.printed import say
from ebft.tools.cli.arguments import ConfigFile, Overrides
from ebft.tools.cli.console import polite, say_error

LOG = "vllm.log"
SERVER_FAILED = 1
# The server reads the keys of vLLM whether training, with the same config, uses it or not.
_IN_TRAINING = r".*no effect without (trl\.)?use_vllm: true"


class Stopped(KeyboardInterrupt):
    """The command was terminated by a signal, which determines its exit code."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("The vLLM server was stopped.")
        self.signal_number = signal_number


@polite
def vllm_serve(
    config: ConfigFile,
    overrides: Overrides = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help=f"Also print the output of the server, which is written to {LOG}.")
    ] = False,
) -> None:
    """Serve the model of a config with vLLM, for training in structured mode.

    Examples:

    ebft vllm-serve run.yaml

    ebft vllm-serve run.yaml vllm.port=8001 vllm.max_model_len=4096

    CUDA_VISIBLE_DEVICES=1 ebft vllm-serve run.yaml vllm.python=vllm-env/bin/python
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_IN_TRAINING)
        run_config = load_config(config, overrides or [])
    from ebft.data.locate import locate, looks_local
    from ebft.errors import ServerError
    from ebft.serving.command import find_interpreter, server_command
    from ebft.serving.server import DEFAULT_TIMEOUT, VLLMServer

    if looks_local(run_config.base_model):
        locate(run_config.base_model, "model", "base_model")
    with _ended_by_signals():
        python = find_interpreter(run_config.vllm.python)
        started = server_command(run_config.server_settings, python, _visible_gpus())
        server = VLLMServer(started, Path(run_config.output_dir) / LOG)
        try:
            with server, _shown(server.log, verbose):
                say(f"Starting vLLM (log: {server.log.path})", err=True)
                server.wait_until_healthy(run_config.trl.vllm_server_timeout or DEFAULT_TIMEOUT)
                say(_ready_line(server.command))
                server.wait()
        except ServerError as error:
            say_error(str(error))
            raise typer.Exit(SERVER_FAILED) from None


def _ready_line(server: Any) -> str:
    lora = f" (LoRA up to rank {server.max_lora_rank})" if server.max_lora_rank is not None else ""
    return f"vLLM is serving {server.model} at {server.url}{lora}. Press Ctrl-C to stop it."


def _visible_gpus() -> int:
    import torch  # slow, and not needed for help and config errors

    return torch.cuda.device_count()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Context manager in which Ctrl-C and SIGTERM raise `Stopped`, so that the server is shut down."""

    def stop(number: int, _: Any) -> None:
        raise Stopped(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _shown(log: Any, verbose: bool) -> Iterator[None]:
    """Context manager that prints the log to stderr if `verbose`."""
    ended = threading.Event()
    thread = threading.Thread(target=log.follow, args=(sys.stderr, ended), daemon=True)
    if verbose:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if verbose:
            thread.join()
