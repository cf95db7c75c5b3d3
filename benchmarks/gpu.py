"""One command for the first hour on a GPU: what works there, how exact and how fast it is, as JSON and as Markdown.

    python -m benchmarks.gpu --plan           # what it would do, without a GPU too
    python -m benchmarks.gpu                  # within 25 minutes on an H100; `make gpu`
    python -m benchmarks.gpu --minutes 9      # parts that fit into 9 minutes; the same command again goes on
    python -m benchmarks.gpu --again          # parts that failed, and those that were skipped, once more
    python -m benchmarks.gpu --device cpu --shape tiny    # the same code on a CPU, at a size that takes minutes

Parts run in order of importance, each in a process of its own, which is stopped at its limit. What a part finds is
stored when it ends, in FILE.json and FILE.md (`--output`), so a part that fails or hangs costs only itself, and another
call of the command, also on another machine with a copy of FILE.json, does not repeat what is done. Ctrl-C, SIGTERM and
a hang-up of SSH end the part in progress and store its rows; with `nohup` or in tmux, a hang-up ends nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LAST_LINES = 25  # of the output of a part that failed
STARTS = 2  # of a part, which the end of the whole command interrupted each time; then it counts as failed
DONE, FAILED, SKIPPED, STARTED = "done", "failed", "skipped", "started"
PACKAGES = {"xdist": "pytest-xdist", "liger_kernel": "liger-kernel", "flash_attn": "flash-attn"}  # of these modules
AXOLOTL = "axolotl-*.whl"  # in the cache of published.py
_PROBE = """
import torch
if not torch.cuda.is_available():
    if torch.version.cuda is None:
        raise SystemExit(f"torch {torch.__version__} is built without CUDA")
    raise SystemExit(f"torch {torch.__version__} with CUDA {torch.version.cuda} finds none: see what nvidia-smi prints")
print(torch.cuda.get_device_name())
"""


@dataclass(frozen=True)
class Part:
    """A function of gpu_parts.py, its limit in minutes, its GPUs, and modules without which it lacks rows."""

    minutes: float
    about: str
    all_gpus: bool = False
    modules: tuple[str, ...] = ()


PARTS: dict[str, Part] = {  # in order of importance
    "device": Part(2.0, "name, memory, driver, build of torch, bfloat16; rates of products, copies and launches", True),
    "exactness": Part(
        2.0, "strided and structured steps beside plain passes: float32, bfloat16 and autocast", modules=("pytest",)
    ),
    "tests": Part(4.0, "the tests that are marked gpu, and runs with its flags", True, ("pytest", "xdist")),
    "step": Part(2.0, "strided steps of a 1B model with 512 to 4096 tokens: seconds, peak memory, full fine-tuning"),
    "methods": Part(2.5, "every method through ebft.train: losses, seconds and memory of its steps"),
    "kernels": Part(1.0, "kernels, waits by line and idle time of a step, by PyTorch's profiler"),
    "beside 1024": Part(3.0, "a strided step with 1024 tokens beside the published trainer (axolotl's)"),
    "flex": Part(
        3.0, "flex_attention beside the portable path: values, gradients, speed, recompilations", modules=("pytest",)
    ),
    "packing": Part(
        1.5, "SFT on short documents: padded, packed, flattened; sdpa and flash attention", modules=("flash_attn",)
    ),
    "memory": Part(
        1.5, "SFT with Liger, offloading, checkpointing: seconds, memory", modules=("liger_kernel", "bitsandbytes")
    ),
    "beside 512": Part(1.5, "a strided step with 512 tokens beside the published trainer"),
    "beside 2048": Part(2.0, "the same with 2048 tokens"),
    "beside 4096": Part(2.5, "the same with 4096 tokens"),
    "vllm": Part(
        2.5, "structured steps with vLLM: in the same process, and a server if there are two GPUs", True, ("vllm",)
    ),
    "processes": Part(2.0, "DDP and FSDP2 on two GPUs: the losses of one process", True, ("pytest",)),
}


@dataclass
class Results:
    """The content of the JSON file, stored at every change."""

    path: Path
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    shape: str = "1b"

    @classmethod
    def read(cls, path: Path, shape: str) -> Results:
        if not path.exists():
            return cls(path, shape=shape)
        try:
            parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
            assert all(record["state"] for record in parts.values())
        except Exception as error:  # of any kind: the file is not ours, and is not overwritten
            raise SystemExit(f"--output: {path} is no result of this command ({error}). Name another file.") from error
        return cls(path, parts, shape)

    def store(self, name: str, record: dict[str, Any]) -> None:
        """Set the record of a part, and write both files."""
        self.parts[name] = {"shape": self.shape, **record}
        self.parts = {name: self.parts[name] for name in PARTS if name in self.parts}  # by importance
        self.path.parent.mkdir(parents=True, exist_ok=True)
        texts = {self.path: json.dumps({"parts": self.parts}, indent=2), self.markdown: table(self.parts)}
        for path, text in texts.items():
            draft = path.with_name(path.name + ".part")
            draft.write_text(text + "\n", encoding="utf-8")
            draft.replace(path)

    @property
    def markdown(self) -> Path:
        return self.path.with_suffix(".md")

    def is_open(self, name: str, again: bool) -> bool:
        """Whether a part is to be run; with `again`, also after an error, or if a module it lacked is there now."""
        record = self.parts.get(name)
        if record is None or record.get("shape", self.shape) != self.shape:  # of another model
            return True
        if record["state"] == STARTED and record["starts"] < STARTS:
            return True
        return again and (record["state"] != DONE or any(map(find_spec, record.get("missing", []))))


def run(name: str, part: Part, options: argparse.Namespace, arrived: list[int]) -> dict[str, Any]:
    """Run a part in a process of its own until a signal has arrived, and return its record."""
    limit = 60 * part.minutes * options.slower
    with tempfile.TemporaryDirectory() as folder:
        into, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu_parts", name, "--into", into, "--seconds", str(limit)]
        command += ["--device", options.device, "--shape", options.shape, "--folder", folder]
        command += ["--wheel", options.wheel] if options.wheel else []
        start = time.monotonic()
        with log.open("w") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            variables = environment(part, options.device, os.environ)
            words = [str(word) for word in command]
            process = subprocess.Popen(words, **streams, cwd=ROOT, env=variables, process_group=0)
            try:
                code = wait(process, limit, arrived)
            finally:
                stop(process)
        found = json.loads(into.read_text(encoding="utf-8")) if into.exists() else {}
        record = {"state": DONE, "seconds": round(time.monotonic() - start, 1), **found}
        if code is None and arrived:
            record |= {"state": STARTED, "error": f"{name_of(arrived)} after {record['seconds']:.0f} s"}
        elif code is None:
            record |= {"state": FAILED, "error": f"stopped after {limit:.0f} s"}
        elif code != 0 and "error" not in record:
            record |= {"state": FAILED, "error": f"exit code {code}" + " (killed)" * (code == -signal.SIGKILL)}
        if record["state"] == FAILED:
            record["output"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return record


def signals() -> list[int]:
    """The signals that ask for the end, as they arrive; they raise nothing, since they come several times."""
    arrived: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as it is with nohup
            signal.signal(number, lambda number, _: arrived.append(number))
    return arrived


def name_of(arrived: list[int]) -> str:
    return f"interrupted by {signal.Signals(arrived[0]).name}"


def wait(process: subprocess.Popen, seconds: float, arrived: list[int]) -> int | None:
    """The exit code of a process; None if it still runs after these seconds, or when a signal has arrived."""
    end = time.monotonic() + seconds
    while not arrived and time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(0.2, seconds))
    return None


def stop(process: subprocess.Popen) -> None:
    """End a process with all that it started: memory of the GPU is free for the next part."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(part: Part, device: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a part's process: this checkout, and the first GPU alone unless it needs all."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
    visible = "" if device == "cpu" else variables.get(VISIBLE, "0").split(",")[0]
    chosen = {} if part.all_gpus and device != "cpu" else {VISIBLE: visible}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**variables, **quiet, "PYTHONPATH": os.pathsep.join(paths), **chosen}


def table(parts: Mapping[str, dict[str, Any]]) -> str:
    """The Markdown page of the results."""
    device = parts.get("device", {}).get("facts", {}).get("device", "a device that was not checked")
    lines = [f"# Measured on {device}", "", "| part | state | seconds | commit | result |", f"|{' --- |' * 5}"]
    for name, record in parts.items():
        seconds, commit = record.get("seconds", ""), record.get("commit", "")
        lines.append(f"| {name} | {record['state']} | {seconds} | {commit} | {shown(outcome(record))} |")
    for name, record in parts.items():
        lines += ["", f"## {name}", "", f"- {PARTS[name].about}"]
        lines += [f"- **{record[key]}**" for key in ("error", "skipped") if key in record]
        lines += [f"- **{line}**" for line in record.get("wrong", [])]
        lines += [f"- {fact}: {shown(value)}" for fact, value in record.get("facts", {}).items()]
        for _, group in groupby(record.get("rows", []), lambda row: next(iter(row))):  # a table for each first column
            rows = list(group)
            columns = list(dict.fromkeys(column for row in rows for column in row))
            lines += ["", f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
            lines += [f"| {' | '.join(shown(row.get(column)) for column in columns)} |" for row in rows]
        if "output" in record:
            lines += ["", "```text", *record["output"], "```"]
    return "\n".join(lines)


def outcome(record: Mapping[str, Any]) -> str:
    """A part's result in a line."""
    wrong = "; ".join(record.get("wrong", []))
    return wrong or record.get("error") or record.get("skipped") or record.get("summary", "")


def shown(value: Any) -> str:
    """A value in a table: numbers with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def plan_text(names: list[str], results: Results, options: argparse.Namespace) -> str:
    """The parts, with the minutes after which each is stopped."""
    lines = []
    for name in names:
        part = PARTS[name]
        state = results.parts.get(name, {}).get("state", "")
        state = f"  [{state}]" if state else ""
        lines.append(f"{part.minutes * options.slower:5.1f} min  {name:<11}  {part.about}{state}")
    total = sum(PARTS[name].minutes for name in names) * options.slower
    lines.append(f"{total:5.1f} min  if each takes all of its minutes; a part starts only if it can end within")
    lines.append(f"{options.minutes:5.1f} min  (--minutes). Results: {results.path} and {results.markdown.name}")
    return "\n".join([*lines, *filter(None, [missing_text(names, options.wheel)])])


def missing_text(names: list[str], wheel: Path | None) -> str:
    """What these parts need and the interpreter does not have, in a line each."""
    found = {module: module for name in names for module in PARTS[name].modules if find_spec(module) is None}
    parts = {module: ", ".join(name for name in names if module in PARTS[name].modules) for module in found}
    lines = [f"Not installed for {sys.executable}:"] if found else []
    lines += [f"    {PACKAGES.get(module, module):<12}  fewer results of: {parts[module]}" for module in found]
    lines += ["    After an installation, --again adds them."] if found else []
    beside = [name for name in names if name.startswith("beside")]
    if beside and not wheel and not list(Path(__file__).parent.glob(f".cache/{AXOLOTL}")):
        lines.append(f"axolotl's wheel is downloaded for: {', '.join(beside)}. --wheel names one without a network.")
    return "\n".join(lines)


def device_name() -> str:
    """The name of the first GPU, found in another process: this one must not hold memory of it. Raises SystemExit."""
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["torch cannot be imported"])[-1]
        raise SystemExit(
            f"No GPU: {reason}. --plan prints what would be measured, and --device cpu --shape tiny runs the same code."
        )
    return done.stdout.strip().splitlines()[-1]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--plan", action="store_true", help="print the parts and their minutes, and measure nothing")
    add("--minutes", type=float, default=25.0, help="start no part that might end later than this (default: 25)")
    add("--slower", type=float, default=1.0, help="a factor for the minutes of parts, on a card slower than an H100")
    add("--parts", nargs="+", choices=list(PARTS), metavar="NAME", help=f"of {', '.join(PARTS)} (default: all)")
    add("--again", action="store_true", help="repeat parts that failed or were skipped")
    add("--fresh", action="store_true", help="repeat all parts")
    add("--output", type=Path, help="the JSON file (default: benchmarks/results/gpu-NAME.json, by the GPU)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--shape", choices=("1b", "tiny"), default="1b", help="of the model: Llama-3.2-1B's, or a small one")
    add("--wheel", type=Path, help="the wheel of the published trainer, where there is no package index")
    options = parser.parse_args(arguments)
    if not all(0 < number < math.inf for number in (options.minutes, options.slower)):
        parser.error("--minutes and --slower must be above 0")
    if options.output and (options.output.suffix != ".json" or options.output.is_dir()):
        parser.error(f"--output: {options.output} must be the path of a .json file; a table goes to .md beside it")
    if options.wheel and not options.wheel.is_file():
        parser.error(f"--wheel: there is no file {options.wheel}")
    options.parts = [name for name in PARTS if name in (options.parts or PARTS)]
    return options


def main(arguments: list[str] | None = None) -> int:
    start, options = time.monotonic(), parse(arguments)
    try:
        name = "cpu" if options.device == "cpu" else device_name()
    except SystemExit as reason:
        print(
            plan_text(options.parts, Results.read(options.output or RESULTS / "gpu-NAME.json", options.shape), options)
        )
        if options.plan:
            print(f"\n{reason}")
            return 0
        raise
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + "-tiny" * (options.shape == "tiny")
    results = Results.read(options.output or RESULTS / f"gpu-{slug}.json", options.shape)
    if options.plan:
        print(plan_text(options.parts, results, options))
        return 0
    waiting = [name for name in options.parts if options.fresh or results.is_open(name, options.again)]
    shortest = min((PARTS[name].minutes for name in waiting), default=0) * options.slower
    if options.minutes < shortest:
        raise SystemExit(f"--minutes: {options.minutes:g} is less than the {shortest:g} of the shortest open part.")
    print(f"{name}: {plan_text(waiting, results, options)}" if waiting else "All parts are done.", flush=True)
    left_out, arrived = [], signals()
    for number, name in enumerate(waiting, 1):
        part = PARTS[name]
        left = options.minutes - (time.monotonic() - start) / 60
        if left < part.minutes * options.slower:
            left_out.append(name)
            continue
        starts = results.parts.get(name, {}).get("starts", 0)
        started = {"state": STARTED, "starts": 1 + starts % STARTS}
        results.store(name, started)
        record = started | run(name, part, options, arrived)
        if record["state"] != STARTED:
            del record["starts"]
        results.store(name, record)
        if arrived:
            with suppress(OSError):  # of a terminal that is gone
                print(f"{name}: {name_of(arrived)}. Results: {results.path}. The same command goes on.", flush=True)
            return 128 + arrived[0]
        took = f"{record['state']} after {record['seconds']:.0f} s"
        print(f"[{number}/{len(waiting)}] {name}: {took}. {outcome(record)}", flush=True)
    print("\n" + results.markdown.read_text(encoding="utf-8") if results.parts else "")
    if left_out:
        print(f"Not started in {options.minutes:g} minutes: {', '.join(left_out)}. The same command goes on with them.")
    failed = [name for name in options.parts if results.parts.get(name, {}).get("state") in (FAILED, STARTED)]
    if failed:
        print(f"Failed: {', '.join(failed)}. `--again` repeats them.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
