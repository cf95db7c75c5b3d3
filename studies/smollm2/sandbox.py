"""Runs generated code in a process of its own, with limits, and reports what each of its examples printed.

It keeps accidents of generated code (endless loops, full memory, removed files, early exits) and cheap tricks (printing
what a pass would print) from mattering. It is no defence against an author who studies it: for hostile code use a
virtual machine.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from typing import Any

CPU_SECONDS = 2
WALL_SECONDS = 6  # for each second of CPU, as several processes may share a core
MEMORY_BYTES = 512 * 2**20

# What the child runs: limits first, then the code, then its examples. Events that change files, start processes or open
# connections are refused by an audit hook, which Python code cannot take away again.
CHILD = r"""
import contextlib, importlib, io, json, os, resource, sys, traceback
task = json.load(sys.stdin)
result = os.fdopen(os.dup(1), "w")
null = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
for limit, value in (
    (resource.RLIMIT_CPU, task["cpu_seconds"]), (resource.RLIMIT_AS, task["memory_bytes"]),
    (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0),
):
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(limit, (value, value))
refused = ("os.", "shutil.", "sqlite3.", "socket.", "subprocess.", "ctypes.", "pty.", "fcntl.", "signal.", "tempfile.",
           "urllib.")
harmless = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv", "os.getxattr",
            "os.listxattr", "os.listdrives", "os.listvolumes", "os.listmounts")
def supervisor(event, arguments):
    writes = event == "open" and arguments[2] and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    if writes or (event.startswith(refused) and event not in harmless):
        raise PermissionError(f"not allowed here: {event}")
found = []
def run(source, mode, names):
    printed, raised = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(source, "<example>", mode), names)
        except Exception as error:
            raised = traceback.format_exception_only(error)[-1]
    return {"printed": printed.getvalue()[:20000], "raised": raised}
sys.addaudithook(supervisor)
names = {}
if task["module"]:
    with contextlib.suppress(Exception):
        names.update(vars(importlib.import_module(task["module"])))
names["__name__"] = "__completion__"
setup = run(task["code"], "exec", names)
if setup["raised"] is None:
    found = [run(source, "single", names) for source in task["examples"]]
json.dump({"key": task["key"], "examples": found}, result)
result.flush()
"""


def run_examples(
    code: str, examples: list[str], module: str = "", cpu_seconds: int = CPU_SECONDS
) -> list[dict[str, Any]]:
    """What each of `examples` printed and raised after `code`; fewer entries where it never got that far.

    The code finds the names of `module`, as where it was taken from. An entry is {"printed": text, "raised": text or
    None}. Empty when the code fails, ends the process, or exceeds `cpu_seconds`, six times as long by the clock, or
    512 MiB.
    """
    key = secrets.token_hex(16)  # what does not hold it was not written by the child's own last lines
    task = {"key": key, "code": code, "module": module, "examples": examples}
    limits = {"cpu_seconds": cpu_seconds, "memory_bytes": MEMORY_BYTES}
    with tempfile.TemporaryDirectory() as folder:
        answer = _run_child(json.dumps({**task, **limits}), folder, cpu_seconds * WALL_SECONDS)
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return []
    return found["examples"] if isinstance(found, dict) and found.get("key") == key else []


def _run_child(task: str, folder: str, timeout: float) -> str:
    """The child's answer; empty after the time limit. Whatever it started is ended with it."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath, "PYTHONHASHSEED": "0"},
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        return child.communicate(task, timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        return ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
