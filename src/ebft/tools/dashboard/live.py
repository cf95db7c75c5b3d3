"""Everything that a run's files say, kept up to date while they grow."""

from __future__ import annotations

import time
from collections import deque
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from ebft.monitor.run_files import HEALTH, LOG, METRICS, ROLLOUTS
from ebft.monitor.run_state import JsonTail, Tail, read_run, state_of
from ebft.tools.dashboard.curves import Curve, Metrics, curves_of, is_number
from ebft.tools.dashboard.rollouts import Sample, one_of_each, samples_of

_NEWEST_BYTES = 2 * 2**20  # of the rollouts and the log that are read at first
_ENTRIES, _SAMPLES, _LINES, _MESSAGES = 20, 16, 500, 200


class LiveRun:
    """The state, metrics, newest rollouts, health messages and log of a run; `poll` reads what is new.

    Missing files are empty. `is_missing` is whether the folder does not exist, `corrupted` the number of lines that
    could not be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: dict[str, Any] = {}
        self.state = "unknown"
        self.metrics = Metrics()
        self.health: deque[dict[str, Any]] = deque(maxlen=_MESSAGES)
        self.log: deque[str] = deque(maxlen=_LINES)
        self.is_missing = False
        self.logs = 0  # lines of metrics.jsonl read so far, to draw curves only if there are new ones
        self._entries: deque[dict[str, Any]] = deque(maxlen=_ENTRIES)
        self._metrics, self._health = JsonTail(folder / METRICS), JsonTail(folder / HEALTH)
        self._rollouts = JsonTail(folder / ROLLOUTS, _NEWEST_BYTES)
        self._log = Tail(folder / LOG, _NEWEST_BYTES)

    def poll(self) -> None:
        """Read what was written since the last call."""
        self.is_missing = not self.folder.is_dir()
        self.run = read_run(self.folder)
        self.state = state_of(self.run)
        lines, restarts = self._metrics.read()
        if restarts:
            self.metrics = Metrics()
            self.logs += 1
        for line in lines:
            self.metrics.add(line)
        self.logs += len(lines)
        for tail, kept in ((self._health, self.health), (self._rollouts, self._entries), (self._log, self.log)):
            found, restarts = tail.read()
            if restarts:
                kept.clear()
            kept.extend(found)

    @property
    def corrupted(self) -> int:
        return sum(tail.corrupted for tail in (self._metrics, self._health, self._rollouts))

    @property
    def config(self) -> dict[str, Any]:
        """The config of the run as resolved; empty if unknown."""
        config = self.run.get("config")
        return config if isinstance(config, dict) else {}

    def curves(self) -> list[Curve]:
        """The curves of the metrics that the run has."""
        return curves_of(self.metrics, self.config)

    def newest(self) -> list[Sample]:
        """The first samples of the newest entry of the log, then one of each earlier entry, newest first."""
        if not self._entries:
            return []
        *earlier, last = self._entries
        return [*islice(samples_of(last), _SAMPLES), *one_of_each(reversed(earlier))]

    @property
    def step(self) -> float:
        """The number of finished optimizer steps."""
        return max(self._number("global_step") or 0, self.metrics.last_step or 0)

    @property
    def max_steps(self) -> int | None:
        """The number of steps of the whole run, or None if unknown."""
        steps = self._number("max_steps")
        return int(steps) if steps is not None and steps > 0 else None

    def seconds_per_step(self) -> float | None:
        """Mean duration of the last steps since the run was started or resumed, or None if unknown."""
        return self.metrics.seconds_per_step(since=self._number("started") or 0.0)

    def seconds_left(self) -> float | None:
        """Estimated time until the last step of a running run, or None if unknown."""
        each = self.seconds_per_step()
        if self.state != "running" or self.max_steps is None or each is None:
            return None
        return max(0.0, (self.max_steps - self.step) * each)

    def seconds_run(self) -> float | None:
        """Time since the start of the run, until now or its end, or None if unknown."""
        started = self._number("started")
        until = time.time() if self.state == "running" else self._number("updated")
        return None if started is None or until is None else max(0.0, until - started)

    def seconds_since_update(self) -> float:
        """Time since run.json was written; 0 if unknown."""
        updated = self._number("updated")
        return 0.0 if updated is None else max(0.0, time.time() - updated)

    def _number(self, key: str) -> float | None:
        """A number in run.json, or None if it has none."""
        value = self.run.get(key)
        return value if is_number(value) else None


def local_time(seconds: Any) -> datetime | None:
    """Seconds since 1970 as a local time, or None if they are no number or no time."""
    try:
        return datetime.fromtimestamp(seconds) if is_number(seconds) else None
    except (ValueError, OverflowError, OSError):  # a year beyond 9999
        return None


def clock(value: Any) -> str:
    """A time of a message, in seconds since 1970 or as text, as hours and minutes."""
    if isinstance(value, int | float):
        when = local_time(value)
        return str(value) if when is None else when.strftime("%H:%M:%S")
    return str(value or "")[11:19] if "T" in str(value) else str(value or "")
