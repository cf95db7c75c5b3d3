"""How a launch ends: exit status, signals, and one readable error."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebft import processes
from ebft.errors import LaunchError
from ebft.tools import cli
from ebft.tools.launch import agent
from ebft.tools.launch.plan import LaunchOptions, Plan
from tests.launch.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """`launched(act, processes)`: the exit status of a launch of tests.launch.worker_stub."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(act, processes=2, launcher="torchrun"):
        options = {
            "torchrun": ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes)],
            "accelerate": ["--num_processes", str(processes), "--num_machines", "1", "--config_file"],
        }[launcher]
        if launcher == "accelerate":
            from ebft.tools.launch.agent import NEUTRAL

            options += [str(NEUTRAL), "--mixed_precision", "no", "--dynamo_backend", "no"]
        words = [*options, "--module", "tests.launch.worker_stub", act, str(tmp_path)]
        monkeypatch.setattr(agent, "launcher_arguments", lambda plan, _: words)
        return agent.launch(Plan(LaunchOptions(launcher=launcher), launcher, processes, 0), [])

    return run


def test_processes_that_end_well(launched):
    assert launched("nothing") == 0
    assert processes.FOLDER not in os.environ


def test_signals_reach_every_process_once_and_the_status_is_theirs(launched, tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert launched("signals") == 143
    expected = f"{signal.SIGINT:d} {signal.SIGTERM:d}"  # SIGHUP is passed on as SIGTERM
    assert [(tmp_path / rank).read_text().replace("Signals.", "") for rank in "01"] == [expected] * 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_killed_process_is_the_error_and_not_what_follows_from_it(launched, capfd):
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL, for example because memory ran out") as raised:
        launched("killed")
    assert raised.value.status == 137
    assert capfd.readouterr() == ("", "")


def test_one_traceback_is_printed(launched, capfd):
    assert launched("traceback") == 1
    printed = capfd.readouterr().err
    assert printed.count("the traceback of") == 1 and "ChildFailedError" not in printed


def test_a_process_that_is_stopped_after_its_report_is_not_killed(launched, capfd):
    assert launched("overtaken") == 1
    printed = capfd.readouterr().err
    assert printed.count("rank 0 failed:\nthe traceback of 0") == 1 and "SIGTERM" not in printed


def test_a_process_that_was_stopped_is_not_the_one_that_failed(tmp_path):
    """The launcher lists both; none has reported."""
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=1) for rank, code in enumerate((-15, 3))}
    assert agent._first_failure(failures, tmp_path) == (1, 3)


def test_an_error_that_a_process_reported_is_not_repeated(launched, capfd):
    assert launched("reported") == 2
    assert capfd.readouterr() == ("reported once\n", "")


def test_a_process_that_ends_without_an_error(launched):
    with pytest.raises(LaunchError, match="rank 1 ended with exit status 3") as raised:
        launched("silent")
    assert raised.value.status == 3


@pytest.mark.parametrize("act, status", [("nothing", 0), ("traceback", 1), ("reported", 2)])
def test_one_process_of_accelerate(launched, act, status):
    assert launched(act, processes=1, launcher="accelerate") == status


def test_a_signal_before_any_process_has_started(monkeypatch, tmp_path):
    monkeypatch.setattr(agent, "_STARTUP", 0.0)
    stop = agent.threading.Event()
    try:
        with pytest.raises(KeyboardInterrupt, match="Interrupted before training started"):
            agent._run(stop.wait, tmp_path, [signal.SIGTERM])
    finally:
        stop.set()


def test_a_launcher_that_cannot_start(monkeypatch):
    def fail(plan, words):
        return ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", "-3", "--module", "x"]

    monkeypatch.setattr(agent, "launcher_arguments", fail)
    with pytest.raises(LaunchError, match="The processes cannot be started"):
        agent.launch(Plan(LaunchOptions(), "torchrun", 1, 0), [])


def test_a_process_that_starts_after_the_launch_ended(tmp_path):
    code = "from ebft.processes import join_launch; join_launch()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), processes.FOLDER: str(tmp_path / "deleted")}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 130


def test_processes_know_the_command_that_started_them(launched, tmp_path):
    assert launched("parent") == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == [str(os.getpid())] * 2
    assert processes.PARENT not in os.environ


@pytest.fixture
def orphan_words(monkeypatch, tmp_path):
    """The command of a process that watches its parent, and writes the signal that stops it."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    return [sys.executable, "-m", "tests.launch.worker_stub", "orphan", str(tmp_path)]


def test_a_process_stops_when_the_command_that_started_it_is_killed(orphan_words, tmp_path):
    code = (
        "import os, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], env={**os.environ, 'EBFT_PARENT': str(os.getpid())})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, *orphan_words])
    wait_until((tmp_path / "started").exists)
    assert not (tmp_path / "stopped").exists()
    parent.kill()
    parent.wait()
    wait_until((tmp_path / "stopped").exists)
    assert (tmp_path / "stopped").read_text() == "15"


def test_a_process_stops_when_that_command_was_killed_before_it_started(orphan_words, monkeypatch, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setenv(processes.PARENT, str(ended.pid))
    assert subprocess.run(orphan_words).returncode == 0
    assert (tmp_path / "stopped").read_text() == "15"


def test_without_a_launch_every_process_reports(monkeypatch):
    monkeypatch.setattr(processes, "_folder", None)
    monkeypatch.delenv(processes.FOLDER, raising=False)
    processes.join_launch()
    assert processes.reports_failure() and not processes.has_failed() and not processes.leave_traceback("text")


def test_every_command_watches_its_parent(monkeypatch):
    called = []
    for name in ("watch_parent", "show_progress_bars_in_terminals_only", "show_warnings", "app"):
        monkeypatch.setattr(f"ebft.tools.cli.{name}", lambda name=name: called.append(name))
    cli.main()
    assert called == ["watch_parent", "show_progress_bars_in_terminals_only", "show_warnings", "app"]
