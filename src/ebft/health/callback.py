"""HealthCallback: checks the table of conditions during training, and reports each one once."""

from __future__ import annotations

import json
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ebft.errors import NonFiniteLossError
from ebft.health.rules import Log, Sighting
from ebft.health.table import CONDITIONS, Condition

FILE = "health.jsonl"
_SAVED_AS = "Health"  # among the `stateful_callbacks` of trainer_state.json
_NON_FINITE = CONDITIONS[0]


class HealthCallback(TrainerCallback):
    """Warns when the logged metrics show that a run fails, and writes `health.jsonl` in the output folder.

    Each condition of `ebft.health.table` is reported once, on the main process, with the step since which it holds and
    what to try: as a warning, and as a JSON line with the keys time (ISO 8601, UTC), step, since, name, message and
    remedy. A new run replaces the file of an earlier one; a resumed run continues with the metrics and reports of its
    checkpoint. For any transformers Trainer; `samples` (per prompt or anchor) and `use_whitening`, which determine the
    diversity of identical samples, are read from the trainer's arguments if they are not given.
    """

    def __init__(self, samples: int | None = None, use_whitening: bool | None = None) -> None:
        self._given: dict[str, Any] = {"samples": samples, "whitened": use_whitening}
        self._log = Log(**self._given)
        self.reported: set[str] = set()  # names of conditions

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log = self._new_log(args)
        self.reported = set(state.stateful_callbacks.get(_SAVED_AS, {}).get("reported", ()))
        for entry in state.log_history:
            self._log.add(entry["step"], entry)
        if state.is_world_process_zero and state.global_step == 0:
            (Path(args.output_dir) / FILE).unlink(missing_ok=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:  # the latter: totals at the end
            return
        self._log.add(state.global_step, logs)
        for condition in CONDITIONS:
            if condition.name not in self.reported:
                sighting = condition.rule(self._log)
                if sighting is not None:
                    self._report(condition, sighting, args, state)

    def unresolved(self, args: Any, state: Any) -> list[str]:
        """The names of the reported conditions that still hold for the newest values of the metrics in `state`."""
        reported = state.stateful_callbacks.get(_SAVED_AS, {}).get("reported", ())
        log = self._new_log(args)
        for entry in state.log_history:
            if "train_runtime" not in entry:
                log.add(entry["step"], entry)
        log.names = frozenset(log.series)  # not only those of the newest entry, which may be an evaluation
        return [each.name for each in CONDITIONS if each.name in reported and each.rule(log) is not None]

    def failed(self, error: NonFiniteLossError, args: Any, state: Any) -> None:
        """Write the condition for the error that ended training; its message is printed elsewhere."""
        if state.is_world_process_zero and _NON_FINITE.name not in self.reported:
            self.reported.add(_NON_FINITE.name)
            step = state.global_step + 1  # the one that was not completed
            self._write(_NON_FINITE, step, step, str(error), args.output_dir)

    def _new_log(self, args: Any) -> Log:
        options = vars(args)
        found = {
            "samples": options.get("num_generations") or options.get("n_samples_per_prompt"),
            "whitened": options.get("use_whitening"),
        }
        given = {name: value for name, value in self._given.items() if value is not None}
        return Log(**(found | given), fp16=args.fp16)

    def _report(self, condition: Condition, sighting: Sighting, args: Any, state: Any) -> None:
        self.reported.add(condition.name)
        state.stateful_callbacks[_SAVED_AS] = {"reported": sorted(self.reported)}
        message = f"{sighting.saw}. {condition.meaning}"
        warnings.warn(
            f"{condition.name} since step {sighting.since} (seen at step {state.global_step}): {message} To try: "
            f"{condition.remedy} (health: false turns these checks off)",
            stacklevel=1,
        )
        self._write(condition, state.global_step, sighting.since, message, args.output_dir)

    def _write(self, condition: Condition, step: int, since: int, message: str, folder: str) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "since": since,
            "name": condition.name,
            "message": message,
            "remedy": condition.remedy,
        }
        path = Path(folder) / FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            warnings.warn(f"{path} cannot be written ({error}).", stacklevel=1)
