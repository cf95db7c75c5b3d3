"""`ebft inference` as a command."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from ebft.cli import app
from ebft.inference.models import model_in_folder
from ebft.inference.sampling import Sampler, SamplingOptions
from tests.cli.conftest import ENVIRONMENT, TERMINAL
from tests.inference.conftest import config_file, folders

__all__ = ["config_file", "folders"]
OPTIONS = ("--max-new-tokens", "8", "--temperature", "0")


def flat(text):
    return " ".join(text.split())


def greedy(folder, prompt, base=False):
    sampler = Sampler(model_in_folder(str(folder)), SamplingOptions(8, 0.0))
    return sampler.text(sampler.reply_ids(prompt, base)[0])


def test_a_prompt_from_the_command_line_and_from_standard_input(folders, config_file, ebft):
    chat = [{"role": "user", "content": "say 3"}]
    expected = {base: greedy(folders["adapter"], chat, base) for base in (False, True)}
    assert expected[False] != expected[True]
    for source in (folders["adapter"], config_file()):
        assert ebft("inference", source, "--prompt", "say 3", *OPTIONS).stdout.strip("\n") == expected[False]
        assert ebft("inference", source, "--prompt", "say 3", "--base", *OPTIONS).stdout.strip("\n") == expected[True]
    piped = CliRunner(env=TERMINAL).invoke(app, ["inference", str(folders["adapter"]), *OPTIONS], input="say 3\n")
    assert piped.stdout.strip("\n") == expected[False]
    plain = ebft("inference", folders["adapter"], "--prompt", "say 3", "--completion", *OPTIONS)
    assert plain.stdout.strip("\n") == greedy(folders["adapter"], "say 3")


def test_base_and_tuned_side_by_side(folders, ebft):
    result = ebft("inference", folders["adapter"], "--prompt", "say 3", "--compare", *OPTIONS)
    assert result.exit_code == 0 and " base " in result.stdout and " tuned " in result.stdout
    refused = ebft("inference", folders["full"], "--prompt", "say 3", "--compare", *OPTIONS)
    assert refused.exit_code == 2 and "Give it with --base-model" in flat(refused.output)


def test_rewards_of_samples(folders, config_file, ebft):
    arguments = (
        "--prompt",
        "say 3",
        "--reference",
        "it is 3",
        "--samples",
        "3",
        "--seed",
        "1",
        "--max-new-tokens",
        "8",
    )
    result = ebft("inference", config_file(), *arguments, "--compare")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("mean reward") == 2 and "alignment" in result.stdout and "diversity" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "neither a config file nor a folder with a model"),
        (["."], "neither a config file nor a folder with a model"),
        ([".", "seed=1"], "overrides require one"),
        ([".", "--prompt", "a", "--reference", " "], "--reference: the text is empty"),
        ([".", "--prompt", "a", "--reference", "b", "--temperature", "0"], "Use --samples 1"),
    ],
)
def test_errors(arguments, message, ebft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = ebft("inference", *arguments, *([] if "--prompt" in arguments else ["--prompt", "a"]))
    assert result.exit_code == 2 and message in flat(result.output)


def test_an_empty_standard_input_and_a_run_without_a_model(folders, config_file, tmp_path):
    empty = CliRunner(env=TERMINAL).invoke(app, ["inference", str(folders["adapter"])], input="")
    assert empty.exit_code == 2 and "standard input is empty" in flat(empty.output)
    untrained = config_file(output_dir=str(tmp_path / "nothing"))
    result = CliRunner(env=TERMINAL).invoke(app, ["inference", str(untrained), "--prompt", "a"])
    assert result.exit_code == 2 and "contains no trained model" in flat(result.output)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [b"\x03", b"\x04"], ids=["ctrl-c", "ctrl-d"])
def test_a_session_in_a_terminal(ends, folders):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ebft.cli", "inference", str(folders["adapter"]), *OPTIONS]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT, start_new_session=True, preexec_fn=_adopt
    )
    os.close(theirs)
    shown = _read_until(ours, b"tuned> ", process)
    os.write(ours, b"say 3\n")
    shown += _read_until(ours, b"tuned> ", process)
    deadline = time.monotonic() + 300
    while process.poll() is None:  # a key that is pressed before the prompt waits for input may only clear the line
        assert time.monotonic() < deadline, shown
        os.write(ours, ends)
        time.sleep(3)
    assert process.returncode == 0
    assert b"Traceback" not in shown and b"chat. /help" in shown


def _adopt():
    """Make the terminal on the standard input that of the new session, so that Ctrl-C is a signal."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # test runners may ignore it, which their children inherit
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(terminal, end, process):
    shown, deadline = b"", time.monotonic() + 300
    while not shown.endswith(end):
        assert time.monotonic() < deadline and process.poll() is None, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096)
    return shown
