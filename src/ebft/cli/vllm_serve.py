"""`ebft vllm-serve CONFIG [key=value ...]`."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ebft.cli.arguments import ConfigFile, Overrides
from ebft.cli.console import polite
from ebft.config.load import load_config

HELP = """Serve a config's model with vLLM, for structured training.

Examples:

ebft vllm-serve run.yaml

ebft vllm-serve run.yaml vllm.port=8001 vllm.max_model_len=4096

CUDA_VISIBLE_DEVICES=1 ebft vllm-serve run.yaml vllm.python=vllm-env/bin/python
"""
LOG = "vllm.log"
SERVER_FAILED = 1


class Stopped(KeyboardInterrupt):
    """The command was asked to end by a signal, which its exit code tells."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("The vLLM server was stopped.")
        self.signal_number = signal_number


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    # Unknown options reach the overrides, which say how they are written.
    settings = {"ignore_unknown_options": True}
    app.command("vllm-serve", help=HELP, short_help="Serve a model with vLLM.", context_settings=settings)(command)


@polite
def command(
    config: ConfigFile,
    overrides: Overrides = None,
    verbose: Annotated[bool, typer.Option("--verbose", help=f"Also show what the server writes to {LOG}.")] = False,
) -> None:
    """Start the server, say where it is once it is ready, and wait for its end or a signal."""
    run_config = load_config(config, overrides or [])
    from ebft.data.locate import locate, looks_local
    from ebft.serving.command import server_command
    from ebft.serving.errors import ServerError
    from ebft.serving.interpreter import find_interpreter
    from ebft.serving.server import DEFAULT_TIMEOUT, VLLMServer

    if looks_local(run_config.base_model):
        locate(run_config.base_model, "model", "base_model")
    with _ended_by_signals():
        python = find_interpreter(run_config)
        server = VLLMServer(server_command(run_config, python, _visible_gpus()), Path(run_config.output_dir) / LOG)
        try:
            with server, _shown(server.log, verbose):
                typer.echo(f"Starting vLLM; its log is {server.log.path}", err=True)
                server.wait_until_healthy(run_config.trl.vllm_server_timeout or DEFAULT_TIMEOUT)
                typer.echo(_ready_line(server.command))
                server.wait()
        except ServerError as error:
            typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(SERVER_FAILED) from None


def _ready_line(server: Any) -> str:
    lora = f" (LoRA up to rank {server.max_lora_rank})" if server.max_lora_rank is not None else ""
    return f"vLLM serves {server.model} at {server.url}{lora}; Ctrl-C stops it"


def _visible_gpus() -> int:
    import torch  # takes seconds, which help and config errors need not wait for

    return torch.cuda.device_count()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """While this lasts, Ctrl-C and SIGTERM raise `Stopped`, so that the server is stopped on the way out."""

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
    """While this lasts, show the log on the error stream if asked to."""
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
