"""Output of the commands on stderr: errors in red, warnings in yellow, one message each."""

import functools
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import typer
from rich.text import Text

from ebft.config.user_functions import place_of
from ebft.errors import LONGEST_MESSAGE, EBFTError, LaunchError, doing, shortened, told
from ebft.machine import is_main_process, leave_error, reports_failure
from ebft.printed import go_on_without_output, safe_console, say, traced, without_secrets_in_text

FAILED = 1
WRONG_INPUT = 2
LOG_LEVEL = "EBFT_LOG_LEVEL"  # environment variable
DEBUG = "EBFT_DEBUG"  # environment variable; if it is set, errors are printed with their tracebacks and in full
INTERRUPTED = 128  # plus the number of the signal, as shells report it


def polite(command: Callable[..., None], goes_on: bool = True) -> Callable[..., None]:
    """The boundary for errors: a command ends with one message and an exit code, whatever is raised, and on Ctrl-C. If
    it `goes_on`, it does so without its output when that cannot be written, for example to a closed pipe."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        if goes_on:
            go_on_without_output()
        status = FAILED
        try:
            return command(*args, **kwargs)
        except typer.Exit:
            raise
        except EBFTError as error:
            _report(error, str(error))
            status = error.status if isinstance(error, LaunchError) else WRONG_INPUT
        except SystemExit as error:  # of user code, for example a callback: training has not ended as it should
            _report(error, f"The code called sys.exit({error.code!r}){place_of(error)}, so the command did not finish.")
        except Exception as error:
            message = f"{told(error)}{place_of(error)}. Set {DEBUG}=1 to see the full traceback."
            if os.environ.get(DEBUG) or not leave_error(message):
                _report(error, message)
        except KeyboardInterrupt as error:
            if is_main_process():  # signals reach all processes
                _end_progress_bars()
                _say(str(error) or "Interrupted.")
            # TrainingInterrupted has the signal number; it is not imported here, since that imports torch.
            status = INTERRUPTED + getattr(error, "signal_number", signal.SIGINT)
        raise typer.Exit(status)

    return run


# For a command without other results than what it prints: it ends if nobody reads it.
listing = functools.partial(polite, goes_on=False)


def say_error(message: str, before: str = "") -> None:
    """Print an error, without passwords and tokens, after the text `before`."""
    _say(before, ("Error: ", "bold red"), (without_secrets_in_text(message), "red"))


def _report(error: BaseException, message: str) -> None:
    if not reports_failure() and not os.environ.get(DEBUG):
        return
    _end_progress_bars()
    if os.environ.get(DEBUG):
        say(traced(error), err=True)
    else:
        message = shortened(message, LONGEST_MESSAGE)
    # The progress bar of another process is not ended from here.
    say_error(message, "\n" if isinstance(error, LaunchError) or not is_main_process() else "")


def _end_progress_bars() -> None:
    """End the lines of unfinished progress bars, so that a last message begins on a separate line."""
    if "ebft.transformers_internals" in sys.modules:  # before it is imported, there are none
        from ebft.transformers_internals import end_progress_bars

        end_progress_bars()


def say_loading() -> None:
    """Say what takes the next seconds, before PyTorch and transformers are imported."""
    if "torch" not in sys.modules and is_main_process():
        say("Loading PyTorch and transformers ...", err=True)


def show_warnings() -> None:
    """Print each warning once, on one line and without its location in the code."""
    seen = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if is_main_process() and str(message) not in seen:
            seen.add(str(message))
            _say(("Warning: ", "bold yellow"), without_secrets_in_text(str(message)))

    warnings.showwarning = show
    warnings.filterwarnings("always", category=UserWarning, module="ebft")
    # Names that PEFT 0.21 and TRL 1.16 use, which transformers 5.24 warns of.
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
    # transformers imports torchao and bitsandbytes where they are installed, and they log each library that they lack.
    for name in ("torchao", "torch.utils", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # accelerate imports DeepSpeed where it is installed, which then says that the machine has no GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def set_log_level() -> None:
    """Log what EBFT_LOG_LEVEL asks for, also of the libraries; debug adds tracebacks. Must be called before the
    libraries are imported, which read these variables then, as started processes do."""
    name = next((name for name in (LOG_LEVEL, "AXOLOTL_LOG_LEVEL") if os.environ.get(name)), None)
    if name is None:
        return
    level = os.environ[name].lower()
    with doing(f"reading {name}"):
        logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for library in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY", "ACCELERATE_LOG_LEVEL"):
        os.environ.setdefault(library, level)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", level.upper())
    if level == "debug":
        os.environ.setdefault(DEBUG, "1")


def _say(*parts: str | tuple[str, str]) -> None:
    between_bars: AbstractContextManager = nullcontext()
    if "tqdm" in sys.modules:  # unfinished progress bars are cleared, and drawn again below
        from tqdm import tqdm

        between_bars = tqdm.external_write_mode(file=sys.stderr)
    with between_bars:
        safe_console(stderr=True, soft_wrap=True).print(Text.assemble(*parts))
