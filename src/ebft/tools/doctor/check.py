"""One line of the doctor's report, and running existing checks so that their errors and warnings become lines."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ebft.errors import EBFTError

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Check:
    """The result of a check. The message of a warning or error includes what to do about it."""

    level: Level
    name: str
    message: str


class Attempt:
    """Runs a function and collects what it raises and warns of as checks.

    After `run`, `checks` has one error, or the warnings, or a single ok; `result` is what the function returned, and
    `failed` tells whether it raised an EBFTError or one of `errors`.
    """

    def __init__(self, name: str, errors: tuple[type[Exception], ...] = ()) -> None:
        self.name, self._errors = name, (EBFTError, *errors)
        self.checks: list[Check] = []
        self.result: Any = None
        self.failed = False

    def run(self, function: Callable[..., Any], *args: Any, ok: str | Callable[[Any], str] = "") -> Attempt:
        """Call `function(*args)`; `ok` is the message if there are no warnings, or a function of the result."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=UserWarning)
            try:
                self.result = function(*args)
            except self._errors as error:
                self.failed = True
                self.checks.append(Check("error", self.name, str(error)))
        ours = [warning for warning in caught if f"{os.sep}torch{os.sep}" not in warning.filename]
        said = dict.fromkeys(str(warning.message) for warning in ours)
        self.checks = [*(Check("warning", self.name, text) for text in said), *self.checks]
        if not self.checks:
            self.checks.append(Check("ok", self.name, ok(self.result) if callable(ok) else ok))
        return self
