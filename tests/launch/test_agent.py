"""How a launch ends: exit status, signals, and one readable error."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebft import errors, machine
from ebft.tools import cli
from ebft.tools.launch import agent
from ebft.tools.launch.agent import NEUTRAL
from ebft.tools.launch.plan import LaunchOptions, Plan
from tests.launch.worker_stub import wait_until

ROOT = Path(__file__).parents[2]
STUB = "tests.launch.worker_stub"
TORCHRUN = "--standalone --local-addr 127.0.0.1 --nproc-per-node 2"
ACCELERATE = f"--num_processes 1 --num_machines 1 --config_file {NEUTRAL} --mixed_precision no --dynamo_backend no"
OF_ACCELERATE = (ACCELERATE, "accelerate")


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """Processes that are started here find the modules."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """`launched(act)`: the exit status of a launch of tests.launch.worker_stub."""

    def run(act, options=TORCHRUN, launcher="torchrun"):
        words = [*options.split(), "--module", STUB, act, str(tmp_path)]
        monkeypatch.setattr(agent, "launcher_arguments", lambda plan, _: words)
        return agent.launch(Plan(LaunchOptions(launcher=launcher), launcher, 2, 0), [])

    return run


def test_processes_that_end_well_know_the_command_that_started_them(launched, tmp_path):
    assert launched("parent") == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == [str(os.getpid())] * 2
    assert machine.LAUNCH_FOLDER not in os.environ and machine.LAUNCH_PARENT not in os.environ


def test_signals_reach_every_process_once_and_the_status_is_theirs(launched, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup sets to be ignored
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert launched("signals") == 143
    finally:
        signal.signal(signal.SIGHUP, before)
    expected = f"{signal.SIGINT:d} {signal.SIGTERM:d}"  # SIGHUP is passed on as SIGTERM
    assert [(tmp_path / rank).read_text().replace("Signals.", "") for rank in "01"] == [expected] * 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(("act", "status", "message"), [
    # and not what follows from it
    ("killed", 137, "rank 1 was killed by SIGKILL, for example because memory ran out"),
    ("silent", 3, "rank 1 ended with exit status 3"),
])  # fmt: skip
def test_a_process_that_ends_without_an_error_of_its_own(launched, capfd, act, status, message):
    with pytest.raises(errors.LaunchError, match=message) as raised:
        launched(act)
    assert raised.value.status == status and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("act", "status", "given"),
    [("traceback", 1, ()), ("reported", 2, ()), ("reported", 2, OF_ACCELERATE), ("nothing", 0, OF_ACCELERATE)],
)
def test_an_error_is_printed_once(launched, capfd, act, status, given):
    assert launched(act, *given) == status
    out, err = capfd.readouterr()
    assert out == "reported once\n" * (status == 2)
    if act == "traceback":
        assert err.count("failed:\nthe traceback of") == 1 and "ChildFailedError" not in err and "SIGTERM" not in err
    else:
        assert err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="no second address")
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_processes_of_one_machine_meet_at_an_address_of_it(launched, launcher, tmp_path):
    two = ACCELERATE.replace("--num_processes 1", "--num_processes 2 --multi_gpu --main_process_port 0")
    assert launched("listening", TORCHRUN if launcher == "torchrun" else two, launcher) == 0
    assert {each for rank in "01" for each in (tmp_path / rank).read_text().split()} == {"127.0.0.2"}


def test_a_signal_before_any_process_has_started(monkeypatch, tmp_path):
    monkeypatch.setattr(agent, "_STARTUP", 0.0)
    stop = agent.threading.Event()
    try:
        with pytest.raises(KeyboardInterrupt, match="Interrupted before training started"):
            agent._run(stop.wait, tmp_path, [signal.SIGTERM])
    finally:
        stop.set()


def test_a_process_that_starts_after_the_launch_ended(monkeypatch, tmp_path):
    monkeypatch.setenv(machine.LAUNCH_FOLDER, str(tmp_path / "deleted"))
    code = "from ebft.machine import join_launch; join_launch()"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 130


def test_a_process_stops_when_the_command_that_started_it_is_killed(tmp_path):
    orphan = [sys.executable, "-m", STUB, "orphan", str(tmp_path)]
    code = "import os, subprocess, sys; os.environ['EBFT_PARENT'] = str(os.getpid()); subprocess.run(sys.argv[1:])"
    parent = subprocess.Popen([sys.executable, "-c", code, *orphan])
    wait_until((tmp_path / "started").exists)
    assert not (tmp_path / "stopped").exists()
    parent.kill()
    parent.wait()
    wait_until((tmp_path / "stopped").exists)
    assert (tmp_path / "stopped").read_text() == "15"


def test_every_command_watches_its_parent(monkeypatch):
    called, names = [], ["watch_parent", "console.show_warnings", "app"]
    for name in names:
        monkeypatch.setattr(f"ebft.tools.cli.{name}", lambda name=name: called.append(name))
    cli.main()
    assert called == names
