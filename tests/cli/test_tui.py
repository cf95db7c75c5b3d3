"""The dashboard in a real terminal, alone and beside a training process."""

import json
import os
import signal

import pytest

from ebft.errors import ConfigError, RunError
from ebft.run_files import is_alive, read_run
from ebft.tools.cli import training as tui
from ebft.tools.dashboard.tui import Training
from tests.dashboard.runs import append, log_line, write_run
from tests.terminal import Terminal, ebft_command

LONG = ("rl=", "max_steps=100000", "save_steps=100000", "save_strategy=steps", "eval_strategy=no", "logging_steps=1")


@pytest.fixture
def in_terminal(tmp_path):
    """`in_terminal("tui", folder)`: a command in a terminal; at the end of the test, nothing of it is left running."""
    started = []

    def start(*arguments):
        started.append(Terminal(ebft_command(*map(str, arguments))))
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()
    run = read_run(tmp_path / "out")
    if run.get("pid", os.getpid()) != os.getpid() and is_alive(run["pid"]):
        os.kill(run["pid"], signal.SIGKILL)


def test_a_finished_run_in_a_terminal(in_terminal, tmp_path):
    folder = tmp_path / "run"
    write_run(folder, "finished", step=100)
    append(folder / "metrics.jsonl", *(log_line(step) for step in range(1, 101)))
    terminal = in_terminal("tui", folder)
    terminal.wait_for(lambda screen: "finished" in screen and "step 100/100" in screen and "alignment" in screen)
    terminal.press("5")
    terminal.wait_for(lambda screen: "some/model" in screen)
    terminal.press("\x03")
    assert terminal.end() == 0


def test_what_has_no_dashboard(refused, run_file, tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    for command in (["tui", tmp_path / "run"], ["train", run_file, "--tui"]):
        assert "requires a terminal" in refused(*command) and not (tmp_path / "out" / "train.log").exists()
    monkeypatch.setattr(tui, "check_terminal", lambda command: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--tui starts the processes itself"):
        tui.train_with_dashboard([], tmp_path)


@pytest.mark.parametrize(("keys", "variables", "is_shown"), [
    (["tui=true"], {}, True), ([], {"EBFT_TUI": "1"}, True), ([], {}, False),
    (["tui=true"], {"EBFT_TUI": "0", "AXOLOTL_TUI": "1"}, False), (["--no-tui", "tui=true"], {"EBFT_TUI": "1"}, False),
    (["tui=true", "--dry-run"], {}, False), (["tui=true"], {"WORLD_SIZE": "1"}, False),
])  # fmt: skip
def test_a_config_and_the_environment_start_the_dashboard(ebft, run_file, monkeypatch, keys, variables, is_shown):
    for name, value in {"EBFT_TUI": "", "AXOLOTL_TUI": "", **variables}.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(tui, "train_here", lambda *given: calls.append(False))
    monkeypatch.setattr(tui, "train_with_dashboard", lambda *given: calls.append(True) or 0)
    with monkeypatch.context() as patched:
        patched.setattr(tui, "is_terminal", lambda: True)
        assert ebft("train", run_file, *keys).exit_code == 0
    assert calls == ([] if "--dry-run" in keys else [is_shown])
    if is_shown:
        with pytest.warns(UserWarning, match="has no effect: training was not started in a terminal"):
            assert ebft("train", run_file, *keys).exit_code == 0
        assert calls == [True, False]


def test_a_log_of_the_user_is_kept(tmp_path):
    (tmp_path / "train.log").write_text("mine")
    with pytest.raises(RunError, match="train.log is not the log of a run, and is kept"):
        Training(["run.yaml"], tmp_path)
    assert (tmp_path / "train.log").read_text() == "mine"


@pytest.mark.slow
def test_training_beside_its_dashboard_is_stopped_with_ctrl_c(in_terminal, run_file, tmp_path):
    terminal = in_terminal("train", run_file, "--tui", *LONG)
    terminal.wait_for(lambda screen: "running" in screen and "grad_norm" in screen)
    terminal.press("\x03")
    terminal.wait_for(lambda screen: "stopped" in screen)
    terminal.press("q")
    assert terminal.end() == 130
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["state"] == "stopped" and (tmp_path / "out" / f"checkpoint-{run['global_step']}").is_dir()
    assert "Resume with" in terminal.output.decode() and "Resume with" in (tmp_path / "out" / "train.log").read_text()


@pytest.mark.slow
def test_training_goes_on_if_the_dashboard_is_killed(in_terminal, run_file, tmp_path):
    terminal = in_terminal("train", run_file, "--tui", *LONG)
    terminal.wait_for(lambda screen: "running" in screen and "grad_norm" in screen)
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    os.kill(terminal.process.pid, signal.SIGKILL)
    terminal.end()
    assert is_alive(run["pid"])
    second = in_terminal("tui", tmp_path / "out")
    second.wait_for(lambda screen: "running" in screen and "grad_norm" in screen)
    os.kill(run["pid"], signal.SIGKILL)
    second.wait_for(lambda screen: "ended without a final state" in screen)
    second.press("q")
    assert second.end() == 0
