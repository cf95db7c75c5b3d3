"""What becomes of the training process when its dashboard is closed."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

_QUESTION = """\
[b]Training is running.[/b]

[b]l[/b]  leave it running and close the dashboard
[b]s[/b]  stop it after this step, with a checkpoint
[b]c[/b]  go back (also Escape)"""


class LeaveDialog(ModalScreen[str]):
    """Asks whether to leave ("leave") or stop ("stop") the training, or to go back ("back")."""

    DEFAULT_CSS = """
    LeaveDialog { align: center middle; }
    LeaveDialog Vertical { width: 56; height: auto; padding: 1 2; border: round $warning; background: $surface; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("l", "dismiss('leave')", "Leave"),
        Binding("s", "dismiss('stop')", "Stop"),
        Binding("c,escape,q", "dismiss('back')", "Back"),
    ]

    def compose(self) -> ComposeResult:
        yield Vertical(Static(_QUESTION))
