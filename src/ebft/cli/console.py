"""Output of the commands on stderr: errors in red, warnings in yellow, one message each."""

import functools
import logging
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from ebft.errors import EBFTError

WRONG_INPUT = 2
INTERRUPTED = 128  # plus the number of the signal, as shells report it


def polite(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command end with one message and an exit code on user errors and Ctrl-C."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EBFTError as error:
            _say(("Error: ", "bold red"), (str(error), "red"))
            raise typer.Exit(WRONG_INPUT) from None
        except KeyboardInterrupt as error:
            _say(str(error) or "Interrupted.")
            # TrainingInterrupted has the signal number; it is not imported here, since that imports torch.
            number = error.signal_number if hasattr(error, "signal_number") else signal.SIGINT
            raise typer.Exit(INTERRUPTED + number) from None

    return run


def show_warnings() -> None:
    """Print each warning once, on one line and without its location in the code."""
    seen = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if is_main_process() and str(message) not in seen:
            seen.add(str(message))
            _say(("Warning: ", "bold yellow"), str(message))

    warnings.showwarning = show
    warnings.filterwarnings("always", category=UserWarning, module="ebft")
    # transformers imports torchao where it is installed, and torchao logs every CUDA library that a machine cannot load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def is_main_process() -> bool:
    """Whether this is the main process (rank 0) or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _say(*parts: str | tuple[str, str]) -> None:
    Console(stderr=True, soft_wrap=True).print(Text.assemble(*parts))
