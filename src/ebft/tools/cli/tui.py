"""`ebft tui FOLDER`, and the dashboard of `ebft train --tui`."""

import os
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

from ebft.errors import RunError
from ebft.printed import say
from ebft.run_files import check_run
from ebft.tools.cli.arguments import RunFolder
from ebft.tools.cli.console import polite

_OUTPUT_LINES = 12  # of the training process, shown if it fails
_LAST_LINES = 3  # shown if it finishes: where the model and the report are, and what to do next


@polite
def tui(folder: RunFolder) -> None:
    """Follow a run in a terminal dashboard, from the files in its output folder.

    The run may be running, also on another machine with the same file system, or have ended. Closing the dashboard does
    not affect it. Requires the package textual: pip install 'ebft[tui]'.

    Keys: 1 to 5 switch between curves, rollouts, health messages, log and config; q or Ctrl-C closes.

    Examples:

    ebft tui outputs/run

    ebft train run.yaml --tui
    """
    check_terminal("ebft tui")
    check_run(folder)
    from ebft.tools.dashboard.tui import Dashboard

    Dashboard(folder).run()


def check_terminal(command: str) -> None:
    """Raise RunError if the dashboard cannot be shown."""
    if find_spec("textual") is None:
        raise RunError(f"{command} requires the package textual: pip install 'ebft[tui]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RunError(f"{command} requires a terminal. `ebft report FOLDER` and `ebft show FOLDER` do not.")


def train_with_dashboard(arguments: list[str], folder: Path) -> int:
    """Run `ebft train ARGUMENTS` in another process beside the dashboard; returns the exit status.

    If the dashboard fails, this waits for the training process instead, and passes Ctrl-C on to it.
    """
    check_terminal("ebft train --tui")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise RunError(
            "--tui starts the processes itself. Use it without a launcher, with --num-processes, or launch without "
            "--tui and run `ebft tui` in another terminal."
        )
    from ebft.tools.dashboard.training import Training
    from ebft.tools.dashboard.tui import TrainingDashboard

    training = Training(arguments, folder)
    try:
        result = TrainingDashboard(folder, training).run()
    except Exception:  # errors of the dashboard must not end the training
        traceback.print_exc()
        result = None
    if training.is_running() and result == "left":
        say(
            f"Training goes on in process {training.pid}, with its output in {training.log}. Follow it with "
            f"`ebft tui {folder}`, stop it with `kill -INT {training.pid}`."
        )
        return 0
    if training.is_running() and result is None:
        say(f"The dashboard ended. Waiting for training (process {training.pid}, output in {training.log}).")
    status = training.wait()
    for line in training.output(_LAST_LINES if status == 0 else _OUTPUT_LINES):
        say(line, err=status != 0)
    return status
