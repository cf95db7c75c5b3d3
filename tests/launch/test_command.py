"""The commands of the launchers, which --dry-run prints, and the options of `ebft train`."""

import shlex
import sys
import textwrap

import pytest
import yaml

from ebft.tools.launch import plan as planning
from ebft.tools.launch.agent import NEUTRAL
from tests.cli.conftest import ebft, plain

__all__ = ["ebft"]


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "a run.yaml"
    path.write_text("base_model: nowhere/model\ndatasets:\n  - {path: some/data, type: completion}\nmax_steps: 7\n")
    return path


@pytest.fixture
def shown(ebft, run_file, monkeypatch):
    """`shown(gpus, *words)`: the words that `ebft train CONFIG WORDS --dry-run` prints."""

    def show(gpus, *words):
        monkeypatch.setattr(planning, "visible_gpus", lambda: gpus)
        result = ebft("train", run_file, "--dry-run", *words)
        assert result.exit_code == 0, result.stderr
        return shlex.split(result.stdout)

    return show


def test_accelerate_with_a_process_per_gpu(shown, run_file):
    words = shown(2, "seed=1")
    assert words[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    options = f"--config_file {NEUTRAL} --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    assert words[3:] == [
        *options.split(),
        *["--multi_gpu", "--main_process_port", "0", "--module", "ebft", "train"],
        str(run_file),
        "seed=1",
    ]


def test_torchrun_on_two_machines_with_its_own_options(shown, run_file):
    machines = ["--num-machines", "2", "--machine-rank", "1", "--main-process-ip", "10.0.0.1"]
    words = shown(4, "--launcher", "torchrun", *machines, "--", "--tee", "3")
    expected = "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --tee 3"
    assert words[1:3] == ["-m", "torch.distributed.run"]
    assert words[3:] == [*expected.split(), "--module", "ebft", "train", str(run_file)]


def test_accelerate_on_two_machines_with_its_own_file(shown, run_file):
    machines = ["--num-machines", "2", "--machine-rank", "0", "--main-process-ip", "host", "--main-process-port", "7"]
    words = " ".join(shown(4, "--num-processes", "8", *machines, "--", "--config_file", "mine.yaml"))
    assert str(NEUTRAL) not in words and "--config_file mine.yaml --module" in words
    assert "--num_processes 8 --num_machines 2" in words
    assert "--machine_rank 0 --same_network --main_process_ip host --main_process_port 7" in words


def test_one_machine_and_cpu(shown, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    words = shown(0, "--launcher", "torchrun", "--num-processes", "2")
    assert words[0] == "OMP_NUM_THREADS=4" and "--standalone --local-addr 127.0.0.1" in " ".join(words)
    words = " ".join(shown(0, "--launcher", "torchrun", "--num-processes", "2", "--main-process-port", "7"))
    assert "--master-addr 127.0.0.1 --master-port 7" in words and "--standalone" not in words
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not shown(0, "--num-processes", "2")[0].startswith("OMP_NUM_THREADS")


def test_one_process(shown, run_file):
    assert shown(1) == [sys.executable, "-m", "ebft", "train", str(run_file)]


def test_the_file_for_accelerate_is_one_that_it_reads():
    from accelerate.commands.config import load_config_from_file

    found = load_config_from_file(str(NEUTRAL))
    assert found.mixed_precision == "no" and str(found.distributed_type.value) == "NO"
    assert set(yaml.safe_load(NEUTRAL.read_text())) <= set(found.__dataclass_fields__)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--num-proceses", "2"], "Unknown option '--num-proceses'. Did you mean --num-processes?"),
        (["--num_processes=2"], "Unknown option '--num_processes'. Did you mean --num-processes?"),
        (["--launcher", "torchrn"], "Did you mean torchrun?"),
        (["--learning-rate=1"], "overrides are written without dashes: learning_rate=1"),
        (["ddp=true"], "ddp: true, but only one process runs"),
        (["ddp=false", "--num-processes", "2"], "ddp: false, but 2 processes were launched"),
        (["--num-processes", "2", "--", "--no-such-option"], "Options after --: accelerate does not accept them: unr"),
        (["--num-processes", "2", "--launcher", "torchrun", "--", "--nproc-per-nod"], "torchrun does not accept them"),
        (["--tui", "--sweep", "nowhere.yaml"], "--tui shows one run"),
        (["--num-processes", "2", "--", "--help"], "accelerate would print its help instead"),
        (["--num-processes", "2", "--", "foo.py"], "'foo.py' is not an option of accelerate"),
        (["--num-processes", "2", "--", "--tee", "3", "foo.py"], "'foo.py' is not an option of accelerate"),
        (["--num-processes", "2", "--", "--num_processes", "3"], "--num_processes of accelerate itself"),
        (["--num-processes", "2", "--", "--num-processes=3"], "--num_processes of accelerate itself"),
        (["--num-processes", "2", "--", "--mixed_precision", "bf16"], "set bf16 or fp16 in the config"),
        (
            ["--num-processes", "2", "--launcher", "torchrun", "--", "--nproc-per-node", "4"],
            "--nproc_per_node of torch",
        ),
        (["--num-processes", "2", "--launcher", "torchrun", "--", "--nproc_per_node=4"], "--nproc_per_node of torch"),
        (["--num-processes", "2", "--launcher", "torchrun", "--", "--nnodes", "2"], "use --num-machines"),
        (["--num-processes", "2", "--launcher", "torchrun", "--", "--standalone"], "--standalone of torchrun itself"),
    ],
)
def test_errors_of_options(ebft, run_file, words, message):
    for more in ([], ["--dry-run"]):
        result = ebft("train", run_file, *more, *words)
        assert result.exit_code == 2 and message in plain(result.stderr), result.stderr


def test_the_dashboard_gets_all_options(ebft, run_file, monkeypatch):
    seen = []
    monkeypatch.setattr("ebft.tools.cli.training.train_with_dashboard", lambda words, folder: seen.append(words) or 0)
    result = ebft("train", run_file, "seed=1", "--tui", "--num-processes", "2", "--", "--tee", "3")
    assert result.exit_code == 0, result.stderr
    expected = [str(run_file), "seed=1", "--num-processes", "2", "--", "--tee", "3"]
    assert seen == [expected]


def test_warnings_are_left_to_the_processes(ebft, run_file, monkeypatch):
    run_file.write_text(run_file.read_text() + "pad_to_sequence_len: true\n")
    monkeypatch.setattr("ebft.tools.cli.training.start", lambda plan, words: 0)
    monkeypatch.setattr("ebft.tools.cli.training.train_here", lambda *given: None)
    with pytest.warns(UserWarning, match="pad_to_sequence_len"):
        assert ebft("train", run_file, "--launcher", "python").exit_code == 0
    assert ebft("train", run_file, "--num-processes", "2").exit_code == 0


def test_the_page_has_every_option_with_its_help(ebft):
    from pathlib import Path

    from typer.main import get_command

    from ebft.tools.cli import app

    page = (Path(__file__).parents[2] / "docs" / "several-processes.md").read_text(encoding="utf-8")
    options = get_command(app).commands["train"].params
    shown = [one for one in options if one.opts[0].startswith("--") and one.opts[0] not in ("--tui", "--help")]
    assert len(shown) == 9
    for one in shown:
        metavar = f" {one.metavar}" if one.metavar else ""
        assert f"| `{one.opts[0]}{metavar}` | {one.help} |" in page, textwrap.shorten(one.help, 60)
