"""`python -m benchmarks.gpu` without a GPU: every part at a small size, parts that fail, and the job file."""

import json
import os
import stat
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, gpu_parts, measuring

WHEEL = os.environ.get("EBFT_AXOLOTL_WHEEL")
CUDA = torch.device("cuda")
FAST = ("device", "packing", "vllm")

# In place of the interpreter: `-m benchmarks.gpu_parts NAME --into FILE ...`, with what NAME does in a variable.
STAND_IN = """#!{python}
import json, os, signal, subprocess, sys, time
from pathlib import Path

name, into, way = sys.argv[3], Path(sys.argv[5]), json.loads(os.environ["WAYS"]).get(sys.argv[3], "done")
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([name, os.environ.get("CUDA_VISIBLE_DEVICES"), *sys.argv[6:]]), file=calls)
rows = [{{"side": "ours", "seconds": 1.5}}]
if way == "hang":
    into.write_text(json.dumps({{"rows": rows}}))
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(os.environ["CALLS"] + ".pid").write_text(str(started.pid))
    time.sleep(60)
if way == "crash":
    sys.exit("the last words")
if way == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
content = {{"state": way, "rows": rows, "facts": {{"device": "a card"}}, "summary": "1.5 s"}}
content |= {{"skipped": "it needs a thing"}} if way == "skipped" else {{}}
content |= {{"error": "ValueError: no", "wrong": ["a | b"]}} if way == "failed" else {{}}
into.write_text(json.dumps(content))
"""


@pytest.fixture
def measure(tmp_path, monkeypatch, capsys):
    """`measure(*words, NAME=way)`: exit code, what was printed and stored, and the calls of parts, with a stand-in."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(gpu.sys, "executable", str(stand_in))
    monkeypatch.setattr(gpu, "device_name", lambda: "NVIDIA H100 80GB")
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv(gpu.VISIBLE, raising=False)

    def measured(*words, **ways):
        monkeypatch.setenv("WAYS", json.dumps(ways))
        (tmp_path / "calls").write_text("")
        output = tmp_path / "gpu.json"
        code = gpu.main(["--output", str(output), *words])
        parts = json.loads(output.read_text())["parts"] if output.exists() else {}
        calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        page = output.with_suffix(".md").read_text() if output.exists() else ""
        return SimpleNamespace(code=code, printed=capsys.readouterr().out, parts=parts, calls=calls, page=page)

    return measured


def test_parts_run_in_order_and_a_rerun_repeats_nothing(measure):
    first = measure()
    assert first.code == 0 and [call[0] for call in first.calls] == list(gpu.PARTS)
    assert list(first.parts) == list(gpu.PARTS) and {part["state"] for part in first.parts.values()} == {"done"}
    assert "# Measured on a card" in first.page and "| side | seconds |\n| --- | --- |\n| ours | 1.5 |" in first.page
    second = measure()
    assert second.calls == [] and second.code == 0 and "All parts are done." in second.printed
    assert [call[0] for call in measure("--fresh", "--parts", "step", "tests").calls] == ["tests", "step"]
    assert [call[0] for call in measure("--shape", "tiny", "--parts", "step").calls] == ["step"]  # of another model


def is_running(pid):
    path = Path(f"/proc/{pid}/status")
    return path.exists() and "\nState:\tZ" not in path.read_text()


@pytest.mark.slow
def test_a_part_that_fails_hangs_or_dies_is_recorded_and_the_next_one_runs(measure, monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.PARTS, "step", replace(gpu.PARTS["step"], minutes=0.05))
    ways = {"device": "failed", "exactness": "crash", "tests": "killed", "step": "hang", "kernels": "skipped"}
    words = ("--parts", *ways, "methods")
    found = measure(*words, **ways)
    errors = [part.get("error") for part in found.parts.values()]
    assert errors[:3] == ["ValueError: no", "exit code 1", "exit code -9 (killed)"] and errors[4:] == [None, None]
    assert errors[3].startswith("stopped after 3 s") and found.parts["step"]["rows"]
    assert found.parts["exactness"]["output"] == ["the last words"] and found.code == 1
    assert "- **it needs a thing**" in found.page and "- **a | b**" in found.page
    assert measure(*words).calls == []
    again = measure("--again", *words)
    assert [call[0] for call in again.calls] == list(ways) and again.code == 0
    assert not is_running((tmp_path / "calls.pid").read_text()), "a process of the part that hung was left"


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "GEMM_SIZE", {"cpu": 64, "cuda": 64})
    return gpu_parts.Setting(torch.device("cpu"), "tiny", tmp_path, Path(WHEEL or "missing.whl"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the command itself measures a GPU")
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in gpu_parts.PARTS if name != "tests"
])  # fmt: skip
def test_a_part_runs(name, setting, tmp_path):
    report = gpu_parts.Report(tmp_path / "into.json")
    missing = {"vllm": "vLLM is not installed"}
    missing |= {} if WHEEL else {f"beside {length}": "axolotl 0.19.0: missing.whl" for length in gpu_parts.LENGTHS}
    if name in missing:
        with pytest.raises(gpu_parts.NotHere, match=missing[name]):
            gpu_parts.PARTS[name](setting, report)
        return
    gpu_parts.PARTS[name](setting, report)
    stored = json.loads((tmp_path / "into.json").read_text())
    assert "wrong" not in stored and stored["rows"] and stored["summary"]
    assert "idle" not in stored["summary"]  # of a device that is not there
    assert not [row for row in stored["rows"] if row.get("failed") and "not installed" not in row["failed"]]


def test_kernels_and_waits_are_counted():
    def event(name, duration_ns=0, on_device=False, is_annotation=False):
        kind = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
        values = {"name": name, "duration_ns": duration_ns, "device_type": kind, "is_user_annotation": is_annotation}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})

    events = [event("void gemm<float>(int)", 3_000_000, True), event("graph", 9, True, is_annotation=True)]
    events += [event("void (anonymous namespace)::gemm<half>(int)", 10**6, True), event("aten::mm")]
    events += [event("Memcpy DtoH", 500_000, True)]
    events += [event("cudaStreamSynchronize"), event("cudaDeviceSynchronize"), event("cudaLaunchKernel")]
    expected = {"kernels": 2, "copies and fills": 1, "waits": 1, "operations on the host": 1, "idle": 0.55}
    found = gpu_parts.device_work(events, 0.01)
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert gpu_parts.longest_kernels(events, 1) == "void gemm 4.0 ms"


def test_a_wait_is_counted_at_the_line_of_the_package(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    scope = {"warn": lambda: warnings.warn("called a synchronizing CUDA operation", stacklevel=1)}
    exec(compile("def inside():\n    warn()", f"{gpu_parts.SOURCE}/strided/x.py", "exec"), scope)
    with gpu_parts.waits_by_line(CUDA) as lines:
        scope["inside"](), scope["inside"](), scope["warn"]()
        warnings.warn("something else", stacklevel=1)
    assert lines == {"strided/x.py:2": 2, "(elsewhere)": 1} and modes == ["warn", "default"]
