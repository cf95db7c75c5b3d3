"""`ebft train --sweep FILE`: the runs that the file describes, trained and evaluated one after another.

A mapping of keys to lists is a grid: every combination of one value per key. A list of mappings names the combinations.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from ebft.config.validation_errors import section_of
from ebft.errors import ConfigError, doing, prefixed
from ebft.files import write_text
from ebft.machine import LAUNCH_PARENT, passed_on, received_signals
from ebft.printed import without_secrets
from ebft.run.config.schema import RunConfig, load_config, parse_yaml
from ebft.run_files import read_object, read_run
from ebft.tools.dashboard.live import LOWER_IS_BETTER
from ebft.tools.launch.plan import LaunchOptions

_OWN = ("output_dir", "resume_from_checkpoint", "auto_resume_from_checkpoints")  # set for each run
MOST_RUNS = 1000  # of a sweep, unless --max-runs is given
_LONGEST = 120  # characters of a name, which is the name of a folder
_yaml = functools.partial(json.dumps, ensure_ascii=False)
_OTHERS = re.compile(r"[^A-Za-z0-9._+-]+")  # characters of values that a name does not contain


@dataclass
class SweepRun:
    """One run of a sweep: the values by their keys, and its name, which its folder has, too.

    `state` is "not started", "finished", "failed" or "stopped". `metrics` and their `intervals` are from
    `ebft evaluate`, empty if that failed; `measured` identifies the model and the settings that they belong to.
    """

    name: str
    values: dict[str, Any]
    output_dir: str = ""
    state: str = "not started"
    exit_status: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, list[float]] = field(default_factory=dict)
    measured: str = ""

    def overrides(self) -> list[str]:
        return [f"{key}={_yaml(value)}" for key, value in self.values.items()]


def read_sweep(path: Path, most: int = MOST_RUNS) -> list[SweepRun]:
    """The runs of a sweep file, in its order. Raises ConfigError if it has none, or more than `most`."""
    with doing(f"reading the sweep file {path}"):
        found = parse_yaml(path.read_text(encoding="utf-8"))
        grid = found if isinstance(found, dict) else None
        entries = [found] if grid else found
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry for entry in entries or [None]):
            raise ConfigError(
                f"{path}: expected a list of values for each key, or one mapping per run; got {found!r:.60}."
            )
        for key, values in (item for entry in entries for item in entry.items()):
            section = section_of(getattr(RunConfig.model_fields.get(key), "annotation", None))
            problem = ""
            if str(key).strip() in _OWN:
                problem = "it cannot be swept: each run has a folder in output_dir and resumes from its own checkpoints"
            elif grid and not (isinstance(values, list) and values):
                problem = f"expected a list of values, got {values!r:.60}"
            elif section is not None and any(isinstance(value, dict) for value in (values if grid else [values])):
                problem = f"a mapping would replace the whole section. Write its keys with dots: {key}.NAME"
            if problem:
                raise ConfigError(f"{path}: {key}: {problem}.")
        count = math.prod(map(len, grid.values())) if grid else len(entries)
        if count > most:  # before the combinations are made
            raise ConfigError(f"{path} describes {count:,} runs, more than {most:,}. Set --max-runs {count}.")
        if grid:
            entries = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
        names = Counter(map(_name, entries))
        return [SweepRun(_name(values) + (_mark(values) * (names[_name(values)] > 1)), values) for values in entries]


def _name(values: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    for key, value in values.items():
        if not isinstance(value, int | float):
            texts[key] = _OTHERS.sub("-", texts[key]).strip("-.") or "empty"
    name = ",".join(f"{key}={text}" for key, text in texts.items())
    return name if len(name) <= _LONGEST else name[:_LONGEST].rstrip(",=") + _mark(values)


def _mark(values: dict[str, Any]) -> str:
    """A suffix for names that are not unique, or shortened."""
    return "-" + hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


RESULTS = "sweep.json"
EVALUATION = "evaluation.json"
# Keys and sections that define what is measured, not only what is trained: the config's values apply to all runs.
_MEASURE = ("rl", "ebft", "trl", "evaluation")
_METRICS = ("ce_loss", "cfm_loss", "alignment", "diversity")
_UNRANKED = ("diversity",)  # low values are better only at the same alignment
_RESUMING = {"auto_resume_from_checkpoints": None}  # differs between the commands of a run
_POLL = 0.1  # seconds
_FAILED = 1


class Sweep:
    """The runs of `ebft train CONFIG OVERRIDES --sweep FILE`; `check` raises an EBFTError before the first starts."""

    def __init__(
        self,
        config: Path,
        overrides: Sequence[str],
        runs: Sequence[SweepRun],
        options: LaunchOptions,
        check: Callable[[Sequence[str]], RunConfig],
    ) -> None:
        self.config, self.overrides, self.options = config, list(overrides), options
        self.runs = list(runs)
        swept = {key for run in runs for key in run.values}
        for word in overrides:
            key = word.partition("=")[0].strip()
            if key in swept:
                raise ConfigError(f"{key} is swept, so it cannot be overridden. Remove {word!r:.100} or the swept key.")
        for run in runs:
            with prefixed(f"The run {run.name} of the sweep"):
                found, measured = check(self._overrides(run)), load_config(self.config, self._measuring(run))
                if found.resume_from_checkpoint is not None:
                    raise ConfigError("resume_from_checkpoint: each run of a sweep resumes from its own. Remove it.")
                if not measured.test_datasets and not measured.val_set_size:
                    raise ConfigError("--sweep evaluates each run on held-out rows. Set test_datasets or val_set_size.")
            self.folder = Path(found.output_dir)
            run.output_dir = str(self.folder / run.name)

    def words(self, run: SweepRun) -> list[str]:
        """The words of the command that trains a run."""
        resumes = "false" if self._has_other_rows(run) or self._has_other_settings(run) else "true"
        own = [f"output_dir={_yaml(run.output_dir)}", f"auto_resume_from_checkpoints={resumes}"]
        return ["train", str(self.config), *self._overrides(run), *own, *self.options.words()]

    def is_finished(self, run: SweepRun) -> bool:
        """Whether the run has ended before with the same config, and its model is there."""
        found = read_run(Path(run.output_dir))
        if found.get("state") != "finished" or self._has_other_rows(run):
            return False
        from ebft.run.output import final_step
        from ebft.run.reporting import description

        config = load_config(self.config, [*self._overrides(run), f"output_dir={_yaml(run.output_dir)}"])
        now, before = description(config)["config"], found.get("config")
        is_same = isinstance(before, dict) and now | _RESUMING == before | _RESUMING
        return is_same and final_step(Path(run.output_dir)) is not None

    def _has_other_rows(self, run: SweepRun) -> bool:
        """Whether the files of `datasets` have changed since the run began, so that it must not be resumed."""
        recorded = read_run(Path(run.output_dir)).get("data_digests")
        if recorded is None:
            return False
        from ebft.run.reporting import data_hashes  # imports datasets

        now = data_hashes(load_config(self.config, self._overrides(run)))
        return len(now) == len(recorded) and any(None not in (a, b) and a != b for a, b in zip(now, recorded))

    def _has_other_settings(self, run: SweepRun) -> bool:
        """Whether the config has changed since the newest checkpoint of the run, which must then not be resumed."""
        if not any(Path(run.output_dir).glob("checkpoint-*")):
            return False
        from ebft.run.checkpoints import newest_checkpoint
        from ebft.run.resume_compat import has_other_settings  # imports transformers

        newest = newest_checkpoint(Path(run.output_dir))
        return newest is not None and has_other_settings(load_config(self.config, self._overrides(run)), newest)

    def train_all(self, say: Callable[[str], None]) -> int:
        """Train and evaluate all runs; the exit status: 0 if all are complete, 1 if not, 128 + n after signal n."""
        earlier = self._earlier()
        for run in self.runs:
            before = earlier.get(run.name, {})
            # Metrics that belong to this model and these settings.
            if before.get("metrics") and self.is_finished(run) and before.get("measured") == self._identity(run):
                run.state, run.exit_status, run.measured = "finished", 0, before["measured"]
                run.metrics, run.intervals = before["metrics"], before.get("intervals", {})
        with received_signals() as received:
            for place, run in enumerate(self.runs):
                if received:
                    break
                say(f"\n[{place + 1}/{len(self.runs)}] {run.name}")
                if self.is_finished(run):
                    say(f"Already finished in {run.output_dir}.")
                    run.state, run.exit_status = "finished", 0
                else:
                    run.metrics, run.intervals, run.measured = {}, {}, ""
                    run.exit_status = _command(self.words(run), received)
                    run.state = "finished" if run.exit_status == 0 else "stopped" if received else "failed"
                if run.state == "finished" and not run.metrics and not received:
                    run.measured, output = self._identity(run), Path(run.output_dir) / EVALUATION
                    output.unlink(missing_ok=True)
                    words = [*self._measuring(run), "--model", run.output_dir, "--output", str(output)]
                    if _command(["evaluate", str(self.config), *words], received, quiet=True) == 0:
                        result = json.loads(output.read_text(encoding="utf-8"))["models"][0]
                        run.metrics, run.intervals = result["metrics"], result["intervals"]
                self._save()
        if received:
            return 128 + passed_on(received[0])
        return 0 if all(run.state == "finished" and run.metrics for run in self.runs) else _FAILED

    def table(self) -> Table:
        """The swept values, state and held-out metrics of all runs, with the best one of each metric."""
        keys = list(dict.fromkeys(key for run in self.runs for key in run.values))
        found = {name for run in self.runs for name in run.metrics}
        others = sorted(name for name in found if name.endswith("pass@1") and name != "alignment_pass@1")
        metrics = [*(name for name in _METRICS if name in found), *others]
        table = Table(*keys, Column("state", no_wrap=True), *metrics, title="Held-out results")
        best: dict[str, SweepRun] = {}
        for name in metrics:
            ranked = sorted((run for run in self.runs if name in run.metrics), key=lambda run: run.metrics[name])
            if len(ranked) > 1 and name not in _UNRANKED:
                best[name] = ranked[0] if name in LOWER_IS_BETTER else ranked[-1]
        if best:
            named = "; ".join(f"{name}: {run.name}" for name, run in best.items())
            table.caption = f"Best run by {named}.\n* best; ~ the interval overlaps with the interval of the best run"
        for run in self.runs:
            values = [json.dumps(run.values[key]) if key in run.values else "" for key in keys]
            state = run.state if run.state != "failed" else f"failed (exit status {run.exit_status})"
            state += ", not evaluated" if run.state == "finished" and not run.metrics else ""
            numbers = []
            for name in metrics:
                mine, others = run.intervals.get(name), best[name].intervals.get(name) if name in best else None
                overlaps = mine and others and mine[0] <= others[1] and others[0] <= mine[1]
                mark = " *" if best.get(name) is run else " ~" if overlaps else ""
                numbers.append(f"{run.metrics[name]:.4g}{mark}" if name in run.metrics else "")
            table.add_row(*values, state, *numbers)
        return table

    def _overrides(self, run: SweepRun) -> list[str]:
        return [*self.overrides, *run.overrides()]

    def _measuring(self, run: SweepRun) -> list[str]:
        """The overrides for the evaluation of a run: without swept values that would change what is measured."""
        own = [word for word in run.overrides() if word.partition("=")[0].split(".")[0] not in _MEASURE]
        return [*self.overrides, *own]

    def _identity(self, run: SweepRun) -> str:
        """What an evaluation depends on: settings, held-out rows, files of the base model and of the trained one."""
        from ebft.catalog import lasting_name
        from ebft.data.sources import content_digest  # imports datasets

        config, folder = load_config(self.config, self._measuring(run)), Path(run.output_dir)
        settings = json.dumps(config.model_dump(mode="json"), sort_keys=True)
        rows = [content_digest(entry) for entry in config.test_datasets or config.datasets]
        base = Path(lasting_name(config.base_model))
        files = [*sorted(folder.glob("ebft_final.json")), *(sorted(base.iterdir()) if base.is_dir() else ())]
        changed = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        return hashlib.sha256(json.dumps([settings, rows, changed]).encode()).hexdigest()

    def _earlier(self) -> dict[str, dict[str, Any]]:
        """The runs that an earlier sweep has stored, by name."""
        return {run["name"]: run for run in (read_object(self.folder / RESULTS) or {}).get("runs", [])}

    def _save(self) -> None:
        names = {run.name for run in self.runs}
        others = [entry for name, entry in self._earlier().items() if name not in names]  # of another sweep file
        runs = [*map(asdict, self.runs), *others]
        content = {"config": str(self.config), "overrides": self.overrides, "runs": runs}
        path = self.folder / RESULTS
        if path.is_file() and path.stat().st_size and "runs" not in (read_object(path) or {}):
            raise ConfigError(f"{path} is not the result of a sweep, and is kept. Change output_dir.")
        with doing(f"writing {path}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(without_secrets(content), indent=2) + "\n")


def _command(words: Sequence[str], received: list[int], quiet: bool = False) -> int:
    """Run `ebft WORDS` and pass signals on to it; returns its exit status, 128 + n after signal n."""
    output = subprocess.DEVNULL if quiet else None
    command, environment = [sys.executable, "-m", "ebft", *words], {**os.environ, LAUNCH_PARENT: str(os.getpid())}
    process = subprocess.Popen(command, env=environment, stdout=output, start_new_session=True)
    sent = 0
    while process.poll() is None:
        for number in received[sent:]:
            process.send_signal(passed_on(number))
        sent = len(received)
        time.sleep(_POLL)
    code = process.returncode
    return 128 - code if code < 0 else code
