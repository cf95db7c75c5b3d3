"""`python -m benchmarks.gpu` without a GPU: every part at a small size, parts that fail, and the job file."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, gpu_parts, guard, measuring
from benchmarks.presets import find_preset

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
        return SimpleNamespace(
            code=code,
            printed=capsys.readouterr().out,
            parts=parts,
            calls=[json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()],
            page=output.with_suffix(".md").read_text() if output.exists() else "",
        )

    return measured


def test_parts_run_in_order_and_a_rerun_repeats_nothing(measure):
    first = measure()
    assert first.code == 0 and [call[0] for call in first.calls] == list(gpu.PARTS)
    assert first.calls[1][1] == "0" and "--shape 1b" in " ".join(first.calls[1][2:])
    assert list(first.parts) == list(gpu.PARTS) and {part["state"] for part in first.parts.values()} == {"done"}
    assert "# Measured on a card" in first.page and "| 1.5 s |" in first.page
    assert "| side | seconds |\n| --- | --- |\n| ours | 1.5 |" in first.page
    second = measure()
    assert second.calls == [] and second.code == 0 and "All parts are done." in second.printed
    assert [call[0] for call in measure("--fresh", "--parts", "step", "tests").calls] == ["tests", "step"]
    assert [call[0] for call in measure("--shape", "tiny", "--parts", "step").calls] == ["step"]  # of another model


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_part_that_fails_hangs_or_dies_is_recorded_and_the_next_one_runs(measure, monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.PARTS, "step", replace(gpu.PARTS["step"], minutes=0.05))
    ways = {"device": "failed", "exactness": "crash", "tests": "killed", "step": "hang", "kernels": "skipped"}
    words = ("--parts", *ways, "methods")
    found = measure(*words, **ways)
    errors = {name: part.get("error") for name, part in found.parts.items()}
    assert errors.pop("step").startswith("stopped after 3 s") and found.parts["step"]["rows"] == [
        {"side": "ours", "seconds": 1.5}
    ]
    assert errors == {
        "device": "ValueError: no",
        "exactness": "exit code 1",
        "tests": "exit code -9 (killed)",
        "kernels": None,
        "methods": None,
    }
    assert found.parts["exactness"]["output"] == ["the last words"] and found.code == 1
    assert "Failed: device, exactness, tests, step. `--again`" in found.printed
    assert "- **it needs a thing**" in found.page and "- **a | b**" in found.page
    assert measure(*words).calls == []
    again = measure("--again", *words)
    assert [call[0] for call in again.calls] == list(ways) and again.code == 0
    assert not is_running((tmp_path / "calls.pid").read_text()), "a process of the part that hung was left"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_part_and_stores_its_rows(number, measure, monkeypatch, tmp_path):
    arrived, wait = [], gpu.wait

    def hung_up(process, seconds, _):
        while not (tmp_path / "calls.pid").exists():
            time.sleep(0.02)
        arrived.extend([number, signal.SIGHUP])  # twice, as from the terminal and from its shell
        return wait(process, seconds, arrived)

    monkeypatch.setattr(gpu, "signals", lambda: arrived)
    monkeypatch.setattr(gpu, "wait", hung_up)
    found = measure("--parts", "step", "methods", step="hang")
    assert found.code == 128 + number and [call[0] for call in found.calls] == ["step"]
    assert found.parts["step"]["rows"] == [{"side": "ours", "seconds": 1.5}] and "| ours | 1.5 |" in found.page
    assert f"interrupted by {number.name} after" in found.parts["step"]["error"]
    arrived.clear()
    monkeypatch.setattr(gpu, "wait", wait)
    assert [call[0] for call in measure("--parts", "step", "methods").calls] == ["step", "methods"]
    assert not is_running((tmp_path / "calls.pid").read_text())


SIGNALS = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):  # which these tests may have been started with or without
    signal.signal(number, signal.SIG_DFL)
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
from benchmarks.gpu import signals

arrived = signals()
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
print([signal.Signals(number).name for number in arrived])
"""


@pytest.mark.parametrize(("way", "ignored"), [("ssh", set()), ("nohup", {"SIGHUP"})])
def test_signals_are_noted_and_a_hang_up_is_ignored_under_nohup(way, ignored):
    printed = subprocess.check_output([sys.executable, "-c", SIGNALS, way], cwd=gpu.ROOT, text=True)
    assert set(json.loads(printed.replace("'", '"'))) == {"SIGHUP", "SIGTERM", "SIGINT"} - ignored


def test_what_is_not_installed_is_said_at_the_start_and_measured_again_when_it_is_there(measure, monkeypatch, tmp_path):
    installed = {"pytest", "xdist", "bitsandbytes"}
    monkeypatch.setattr(gpu, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(gpu, "AXOLOTL", "none")
    for words in (["--plan"], []):
        printed = measure(*words, "--parts", "memory", "packing", "beside 512").printed
        assert "    liger-kernel  fewer results of: memory" in printed and "bitsandbytes" not in printed
        assert "    flash-attn    fewer results of: packing" in printed
        assert "axolotl's wheel is downloaded for: beside 512. --wheel" in printed
    record = {"state": "done", "seconds": 1.0, "missing": ["flash_attn"]}
    (tmp_path / "gpu.json").write_text(json.dumps({"parts": {"packing": record}}))
    words = ("--parts", "packing")
    assert measure("--again", *words).calls == []
    installed.add("flash_attn")
    assert measure(*words).calls == [] and [call[0] for call in measure("--again", *words).calls] == ["packing"]
    assert "missing" not in measure(*words).parts["packing"]


def test_parts_without_a_package_are_skipped_or_lack_rows(setting, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_parts, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_parts.sft_packing, "main", lambda words: Path(words[7]).write_text('{"ways": []}'))
    monkeypatch.setattr(gpu_parts, "_train", lambda setting, report, name, *_: report.row({"run": name}))
    for name in ("exactness", "tests", "flex", "processes"):
        with pytest.raises(gpu_parts.NotHere, match="needs pytest: pip install pytest"):
            gpu_parts.PARTS[name](setting, gpu_parts.Report())
    found = {name: gpu_parts.Report() for name in ("memory", "packing")}
    for name, report in found.items():
        gpu_parts.PARTS[name](setting, report)
        assert set(report.content["missing"]) == set(gpu.PARTS[name].modules)
    assert found["memory"].content["summary"] == "5 runs, without adamw_8bit, Liger"


def test_no_part_starts_that_might_end_too_late(measure):
    found = measure("--minutes", "3", "--parts", "device", "flex", device="done")
    assert [call[0] for call in found.calls] == ["device"]
    assert "Not started in 3 minutes: flex. The same command goes on" in found.printed and found.code == 0
    with pytest.raises(SystemExit, match="--minutes: 2.5 is less than the 3 of the shortest open part"):
        measure("--minutes", "2.5", "--parts", "device", "flex")
    assert [call[0] for call in measure("--minutes", "2.5", "--parts", "flex", "memory").calls] == ["memory"]
    assert [call[0] for call in measure("--minutes", "3.5", "--parts", "device", "flex").calls] == ["flex"]


def test_a_part_that_ended_the_whole_command_is_tried_once_more(measure, tmp_path):
    for starts, runs in ((1, True), (2, False)):
        (tmp_path / "gpu.json").write_text(json.dumps({"parts": {"device": {"state": "started", "starts": starts}}}))
        found = measure("--parts", "device")
        assert bool(found.calls) is runs and found.code == int(not runs)
    assert measure("--parts", "device", "--again").code == 0


def test_each_part_sees_the_first_gpu_unless_it_needs_all():
    one, every = gpu.PARTS["step"], gpu.PARTS["processes"]
    for part, device, given, expected in (
        (one, "cuda", {}, "0"),
        (one, "cuda", {gpu.VISIBLE: "3,5"}, "3"),
        (every, "cuda", {gpu.VISIBLE: "3,5"}, "3,5"),
        (every, "cuda", {}, None),
        (every, "cpu", {}, ""),
    ):
        assert gpu.environment(part, device, given).get(gpu.VISIBLE) == expected
    assert gpu.environment(one, "cuda", {"PYTHONPATH": "mine"})["PYTHONPATH"].endswith(f"{os.pathsep}mine")


def test_without_a_gpu_it_says_what_it_would_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "_PROBE", "raise SystemExit('torch 9 is built without CUDA')")
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    assert gpu.main(["--plan"]) == 0
    printed = capsys.readouterr().out
    assert all(part.about in printed for part in gpu.PARTS.values())
    assert "No GPU: torch 9 is built without CUDA. --plan prints" in printed
    with pytest.raises(SystemExit, match="No GPU: torch 9 is built without CUDA"):
        gpu.main([])
    assert "25.0 min" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "must be above 0"),
        (["--slower", "nan"], "must be above 0"),
        (["--output", "x.md"], "must be the path of a .json file"),
        (["--parts", "speed"], "invalid choice: 'speed'"),
        (["--wheel", "missing.whl"], "--wheel: there is no file missing.whl"),
    ],
)
def test_bad_options(words, message, capsys):
    with pytest.raises(SystemExit):
        gpu.parse(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", '{"parts": {"device": 5}}'])
def test_a_file_that_is_no_result_is_not_overwritten(content, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(SystemExit, match=r"x\.json is no result of this command"):
        gpu.Results.read(tmp_path / "x.json", "1b")


def test_every_part_of_the_plan_exists():
    assert set(gpu.PARTS) == set(gpu_parts.PARTS)


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "GEMM_SIZE", {"cpu": 64, "cuda": 64})
    return gpu_parts.Setting(torch.device("cpu"), "tiny", tmp_path, Path(WHEEL or "missing.whl"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the command itself measures a GPU")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in gpu_parts.PARTS if name != "tests"],
)
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


def test_the_marked_tests_are_found_and_their_outcomes_counted(setting, monkeypatch):
    report = gpu_parts.Report()
    lines = ["tests/a.py::test_x PASSED", "[gw1] FAILED tests/a.py::test_y[llama]", "FAILED tests/a.py::test_y - boom"]
    commands = []

    class Process(SimpleNamespace):
        __enter__ = lambda self: self
        __exit__ = lambda self, *_: None

    def start(command, **_):
        commands.append(command)
        return Process(stdout=[f"{line}\n" for line in lines], returncode=1)

    monkeypatch.setattr(gpu_parts.subprocess, "Popen", start)
    gpu_parts.marked_tests(setting, report)
    assert "-vv" in commands[0]  # one more than the -q of pyproject.toml takes away: a line for each test
    assert {"tests/strided/test_gpu.py", "tests/structured/test_gpu.py"} <= set(commands[0])
    assert "tests/benchmarks/test_gpu.py" not in commands[0]
    assert report.content["summary"] == "1 passed, 1 failed"
    assert report.content["wrong"] == [lines[1]] and report.content["state"] == "failed"


def test_what_only_cuda_reports(monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for free, bf16, wrong in ((79, True, []), (40, False, ["no bfloat16", "40.0 GiB of the GPU are in use"])):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, bf16=bf16: bf16)
        report = gpu_parts.Report()
        gpu_parts._check_cuda(CUDA, report, "580.1")
        facts, found = report.content["facts"], report.content.get("wrong", [])
        assert (facts["capability"], facts["free_gib"], facts["driver"]) == ("9.0", free, "580.1")
        assert len(found) == len(wrong) and all(part in line for part, line in zip(wrong, found))


def test_kernels_and_waits_are_counted():
    def event(name, duration_ns=0, on_device=False, is_annotation=False):
        kind = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
        values = {"name": name, "duration_ns": duration_ns, "device_type": kind, "is_user_annotation": is_annotation}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})

    events = [
        event("void gemm<float>(int)", 3_000_000, True),
        event("void (anonymous namespace)::gemm<half>(int)", 10**6, True),
    ]
    events += [event("Memcpy DtoH", 500_000, True), event("graph", 9, True, is_annotation=True), event("aten::mm")]
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


def test_memory_and_seconds_on_cuda(monkeypatch):
    calls = []
    for name, value in (("synchronize", None), ("reset_peak_memory_stats", None), ("max_memory_allocated", 3 * 2**30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name, value=value: (calls.append(name), value)[1])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30)
    assert measuring.with_peak_memory(lambda: "result", CUDA) == ("result", 2048)
    assert calls == ["synchronize", "reset_peak_memory_stats", "synchronize", "max_memory_allocated"]
    steps, calls[:] = gpu_parts.StepTimes(CUDA), []
    for number in (0, 1):
        steps.on_step_begin(None, SimpleNamespace(global_step=number), None)
        steps.on_step_end(None, None, None)
    assert len(steps.seconds) == 2 and steps.peak_gib == 3 and calls.count("reset_peak_memory_stats") == 1


def test_vllm_shares_the_gpu_with_training_and_serves_on_a_second_one(setting, monkeypatch):
    monkeypatch.setattr(gpu_parts, "find_spec", lambda name: name)
    monkeypatch.delenv("EBFT_VLLM_PYTHON", raising=False)
    configs = []
    history = [{"loss": 0.5}]

    def train(config):
        configs.append(config)
        steps = sys.modules["ebft.run.trainer"].ProgressBar
        steps.seconds = [1.0] * gpu_parts.STEPS
        return SimpleNamespace(trainer=SimpleNamespace(state=SimpleNamespace(log_history=history)))

    monkeypatch.setattr(gpu_parts.ebft, "train", train)
    report = gpu_parts.Report()
    gpu_parts.vllm(setting, report)
    assert [config.trl.use_vllm for config in configs] == [False, True], report.content
    assert configs[1].trl.vllm_mode == "colocate" and configs[1].vllm.gpu_memory_utilization == 0.3
    history[0] = {"loss": float("nan")}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("EBFT_VLLM_PYTHON", sys.executable)
    gpu_parts.vllm(setting, report)
    assert report.content["wrong"] == [f"{name}: losses [nan]" for name in ("generate", "colocate", "managed")]
    assert configs[-1].trl.vllm_mode == "managed" and configs[-1].vllm.python == sys.executable


def test_runs_train_a_model_of_the_shape_on_long_rows(setting, monkeypatch):
    small = find_preset("1b", on_cuda=False).shrunken()
    small = replace(small, shape={**small.shape, "vocab_size": 8192})
    monkeypatch.setattr(gpu_parts, "find_preset", lambda name, on_cuda: small)
    setting.shape, report = "1b", gpu_parts.Report()
    for name in ("SFT LoRA", "DPO LoRA"):
        gpu_parts._train(setting, report, name, *guard.METHODS[name], 64)
    assert "wrong" not in report.content and report.content["summary"] == "2 runs"
    assert json.loads((setting.folder / "shape" / "config.json").read_text())["num_hidden_layers"] == 4
    rows = [json.loads(line) for line in (setting.folder / "rows.jsonl").read_text().splitlines()]
    assert len(rows[0]["input"].split()) + len(rows[0]["output"].split()) == 56 and setting.tokens(512) == 512


def test_summaries_show_the_main_numbers():
    rows = [
        {"tokens": 1024, "side": "ours", "peak GiB": 12.34, "seconds": 0.5},
        {"tokens": 1024, "side": "ours full", "peak GiB": None, "seconds": 0.75},
        {"tokens": 1024, "side": "ours single pass", "peak GiB": None, "failed": "out of memory"},
        {"tokens": 2048, "side": "ours", "peak GiB": 20.0, "seconds": 1.0},
    ]
    assert gpu_parts.main_steps(rows, 1024) == "1024 tokens: ours 0.5 s 12.3 GiB, ours full 0.75 s"
    assert gpu_parts.main_steps(rows[2:3], 1024) == "1024 tokens: all failed"
    errors = [("float32", 1e-7, 0.0), ("float32", 3e-7, 0.0), ("bfloat16", 0.02, 0.03), ("autocast", 0.01, 0.02)]
    rows = [
        {"precision": name, "gradient difference": ours, "gradient difference, plain": plain}
        for name, ours, plain in errors
    ]
    expected = "float32 3.0e-07, bfloat16 2.0e-02 (plain passes 3.0e-02), autocast 1.0e-02 (plain passes 2.0e-02)"
    assert gpu_parts.main_errors([*rows, {"tokens": 1024}]) == f"gradients differ by: {expected}"


def test_two_gpus_are_needed_for_two_processes(setting, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(gpu_parts.NotHere, match="two are needed"):
        gpu_parts.processes(gpu_parts.Setting(CUDA, "1b", setting.folder), gpu_parts.Report())


def test_an_error_and_a_result_that_is_wrong_fail_the_part(monkeypatch, tmp_path):
    def breaks(setting, report):
        report.row({"side": "ours"})
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    def differs(setting, report):
        report.wrong("not equal")

    def lacks(setting, report):
        raise gpu_parts.NotHere("it needs a thing")

    found = {}
    for name, part in (("step", breaks), ("flex", differs), ("vllm", lacks)):
        monkeypatch.setitem(gpu_parts.PARTS, name, part)
        words = [name, "--into", str(tmp_path / name), "--folder", str(tmp_path), "--device", "cpu", "--seconds", "60"]
        assert gpu_parts.main(words) == 0
        found[name] = json.loads((tmp_path / name).read_text())
    assert found["step"]["state"] == "failed" and found["step"]["rows"] == [{"side": "ours"}]
    assert found["step"]["error"] == "OutOfMemoryError: CUDA out of memory." and found["step"]["commit"]
    assert found["flex"]["state"] == "failed" and found["flex"]["wrong"] == ["not equal"]
    assert found["vllm"]["state"] == "skipped" and found["vllm"]["skipped"] == "it needs a thing"


@pytest.mark.slow  # a process that imports everything
def test_the_whole_command(tmp_path):
    words = ["--device", "cpu", "--shape", "tiny", "--parts", "device", "vllm", "--output", str(tmp_path / "x.json")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words], cwd=gpu.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "x.json").read_text())["parts"]
    assert [part["state"] for part in parts.values()] == ["done", "skipped"] and parts["device"]["commit"]
    assert "# Measured on cpu: " in (tmp_path / "x.md").read_text()


PRETEND = """
import tempfile, warnings
from pathlib import Path
from tests.devices.pretend import pretend_device, register

register()
from benchmarks import gpu_parts

with pretend_device() as device, tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
    setting, report = gpu_parts.Setting(device, "tiny", Path(folder)), gpu_parts.Report()
    gpu_parts._strided_errors(setting, report, "float32", "strided", {}, None)
    gpu_parts._structured_errors(setting, report, "float32")
    assert len(report.content["rows"]) == 2 and "wrong" not in report.content, report.content
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a real accelerator")
def test_exactness_mixes_no_devices():
    done = subprocess.run([sys.executable, "-c", PRETEND], cwd=gpu.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("variables", "is_environment", "expected"),
    [
        (
            {},
            False,
            ["-m venv --system-site-packages", "-m pip .* -e .[dev]", "-m pip", "-m benchmarks.gpu --fresh"],
        ),
        ({"PYTHON": "python3"}, False, ["-m benchmarks.gpu --fresh"]),
        ({}, True, ["-m pip .* -e .[dev]", "-m pip .* liger-kernel", "-m benchmarks.gpu --fresh"]),
        (
            {"EXTRAS": "dev,vllm"},
            True,
            ["-m pip .* -e .[dev,vllm]", "-m pip .* liger-kernel", "-m benchmarks.gpu --fresh"],
        ),
        ({"WHEELS": "wheels"}, True, ["-m pip .* --no-index .* wheels/a.whl", "-m benchmarks.gpu --fresh"]),
    ],
)
def test_the_job_file(variables, is_environment, expected, tmp_path):
    """Its steps, with a python3 that prints what it is asked to run."""
    checkout, called = tmp_path / "ebft", tmp_path / "called"
    for folder in (checkout / "benchmarks", checkout / "wheels", tmp_path / "bin"):
        folder.mkdir(parents=True)
    (checkout / "wheels" / "a.whl").touch()
    (checkout / "benchmarks" / "gpu.sh").write_text((gpu.ROOT / "benchmarks" / "gpu.sh").read_text())
    python = tmp_path / "bin" / "python3"
    venv = '[ "$2" = venv ] && mkdir -p "$4/bin" && cp "$0" "$4/bin/python"'
    called_line = f'echo "$@" "[$PYTHONPATH]" >> {called}'
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {int(not is_environment)}\n{venv}\n{called_line}\n')
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", **variables}
    job = ["sh", str(checkout / "benchmarks" / "gpu.sh")]
    subprocess.run([*job, "--plan"], env=environment, cwd=tmp_path, check=True)
    assert called.read_text() == "-m benchmarks.gpu --plan []\n"  # nothing is installed
    called.unlink()
    subprocess.run([*job, "--fresh"], env=environment, cwd=tmp_path, check=True)
    lines = called.read_text().splitlines()
    assert len(lines) == len(expected)
    for line, parts in zip(lines, expected):
        assert all(part in line for part in parts.split(" .* ")), line
    assert lines[-1].endswith("[]") != ("WHEELS" in variables)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_plan_needs_only_the_standard_library():
    """`make gpu OPTIONS=--plan` in a clone where nothing is installed, with an interpreter without packages."""
    make = ["make", "--silent", "gpu", "OPTIONS=--plan", "VENV=.no-venv", f"PYTHON={sys.executable} -S"]
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    done = subprocess.run(make, cwd=gpu.ROOT, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in gpu.PARTS) and "Not installed for" in done.stdout
    assert not (gpu.ROOT / ".no-venv").exists()
