"""The commands of the launchers, which --dry-run prints, and the options of `ebft train`."""

import shlex
import sys

import pytest

from ebft.tools.launch import plan as planning
from ebft.tools.launch.agent import NEUTRAL


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = tmp_path / "a run.yaml"
    path.write_text("base_model: nowhere/model\ndatasets:\n  - {path: some/data, type: completion}\nmax_steps: 7\n")
    return path


@pytest.fixture
def shown(ebft, run_file, monkeypatch):
    """`shown(gpus, words)`: the words that `ebft train CONFIG WORDS --dry-run` prints."""

    def show(gpus, words=""):
        monkeypatch.setattr(planning, "visible_gpus", lambda: gpus)
        result = ebft("train", run_file, "--dry-run", *words.split())
        assert result.exit_code == 0, result.stderr
        return shlex.split(result.stdout)

    return show


TWO = f"--config_file {NEUTRAL} --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"


@pytest.mark.parametrize(
    ("gpus", "words", "module", "options", "overrides"),
    [
        (2, "seed=1", "accelerate.commands.launch", f"{TWO} --multi_gpu --main_process_port 0", ["seed=1"]),
        (
            4,
            "--launcher torchrun --num-machines 2 --machine-rank 1 --main-process-ip 10.0.0.1 -- --tee 3",
            "torch.distributed.run",
            "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --tee 3",
            [],
        ),
    ],
)
def test_the_command_of_a_launcher(shown, run_file, gpus, words, module, options, overrides):
    expected = [sys.executable, "-m", module, *options.split(), "--module", "ebft", "train", str(run_file)]
    assert shown(gpus, words) == expected + overrides


def test_one_machine_and_cpu(shown, run_file, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    words = shown(0, "--launcher torchrun --num-processes 2")
    assert words[0] == "OMP_NUM_THREADS=4" and "--standalone --local-addr 127.0.0.1" in " ".join(words)
    words = " ".join(shown(0, "--launcher torchrun --num-processes 2 --main-process-port 7"))
    assert "--master-addr 127.0.0.1 --master-port 7" in words and "--standalone" not in words
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not shown(0, "--num-processes 2")[0].startswith("OMP_NUM_THREADS")
    assert shown(1) == [sys.executable, "-m", "ebft", "train", str(run_file)]
