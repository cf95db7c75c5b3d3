"""How a run is started: the number of processes and the launcher by options, config and machine, and the commands."""

import shlex
import sys
import warnings

import pytest

from ebft.errors import ConfigError
from ebft.run.config.schema import RunConfig
from ebft.tools.launch import agent, ray_driver
from ebft.tools.launch import plan as planning
from ebft.tools.launch.plan import RAY, LaunchOptions, plan_launch

ROWS = {"base_model": "some/model", "datasets": [{"path": "some/data", "type": "ebft_opencode.transform"}]}
MANAGED = {"rl": "ebft", "ebft": {"mode": "structured"}, "trl": {"use_vllm": True, "vllm_mode": "managed"}}
MANAGED |= {"vllm": {"tensor_parallel_size": 2}}
MACHINES = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1"}


def config_with(**keys):
    with warnings.catch_warnings(action="ignore"):
        return RunConfig.from_dict({**ROWS, **keys})


@pytest.fixture
def planned(monkeypatch):
    """`planned(gpus, keys, **options)`: the plan on a machine with so many GPUs."""

    def plan(gpus, keys=None, **options):
        monkeypatch.setattr(planning, "visible_gpus", lambda: gpus)
        return plan_launch(LaunchOptions(**options), config_with(**(keys or {})))

    return plan


ALL = "Starting 4 processes with accelerate, one per GPU. --launcher python trains in one process."
ONE = "Training in one process on one of 4 GPUs, because of ddp: false."
SERVER = "with torchrun on 2 of 4 GPUs; the others are for the vLLM server."
OF_MACHINES = "with accelerate on machine 1 of 2 (counted from 0), one per GPU."
OF_RAY = "Starting 2 workers with Ray Train on a local Ray (one GPU each, or one CPU if Ray has no GPUs)."
ON = lambda device: {"rl": "ebft", "ebft": {"mode": "strided", "feature_device": device}}


@pytest.mark.parametrize("gpus, keys, options, launcher, processes, note", [
    (0, {}, {}, None, 1, ""),
    (0, {}, {"passed_on": ("--debug",)}, "accelerate", 1, ""),  # words for the launcher are never left out
    (4, {}, {}, "accelerate", 4, ALL),
    (4, {}, {"num_processes": 2}, "accelerate", 2, "2 processes with accelerate on 2 of 4 GPUs."),
    (0, {}, {"num_processes": 3}, "accelerate", 3, "Starting 3 processes with accelerate on CPU."),
    (4, {"ddp": False}, {}, None, 1, ONE), (4, ON("cuda:3"), {}, None, 1, ""),
    (4, MANAGED, {"launcher": "torchrun"}, "torchrun", 2, SERVER),
    (3, MANAGED, {}, None, 1, ""),  # the server takes two
    (4, {}, {**MACHINES, "num_processes": 8}, "accelerate", 8, OF_MACHINES), (0, {}, MACHINES, "accelerate", 2, ""),
    (4, {"use_ray": True, "ray_num_workers": 2}, {}, RAY, 2, OF_RAY),
])  # fmt: skip
def test_the_number_of_processes_and_the_line_about_it(planned, gpus, keys, options, launcher, processes, note):
    plan = planned(gpus, keys, **options)
    assert (plan.launcher, plan.processes) == (launcher, processes) and plan.note.endswith(note)


@pytest.mark.parametrize("keys, options, message", [
    ({}, {**MACHINES, "machine_rank": 2}, "requires --machine-rank, 0 to 1"),
    ({}, {**MACHINES, "num_processes": 3}, "must be a multiple of --num-machines 2"),
    ({}, {"num_processes": 2, "passed_on": ("--use_fsdp",)}, "--use_fsdp after --: ebft train sets it"),
    ({"use_ray": True}, {"num_processes": 2}, "by ray_num_workers. Remove: --num-processes"),
])  # fmt: skip
def test_options_that_cannot_work(planned, keys, options, message):
    with pytest.raises(ConfigError, match=message):
        planned(0, keys, **options)


def test_a_launched_process_launches_nothing(planned, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert planned(4).launcher is None
    with pytest.raises(ConfigError, match="A launcher started this process"):
        planned(4, num_processes=2)


def test_the_words_of_options_are_those_of_the_command():
    options = LaunchOptions("torchrun", 4, 2, 0, "host", 7, ("--tee", "3"))
    expected = "--launcher torchrun --num-processes 4 --num-machines 2 --machine-rank 0 --main-process-ip host"
    assert options.words() == f"{expected} --main-process-port 7 -- --tee 3".split()
    assert LaunchOptions().words() == []


def test_a_local_ray_must_have_the_resources_and_a_cluster_may_grow(planned, monkeypatch, capsys):
    for keys, available, resources in (
        ({}, {"CPU": 2.0, "GPU": 1.0}, {"GPU": 1.0}),
        ({}, {"CPU": 2.0}, {"CPU": 1.0}),
        ({"resources_per_worker": {"CPU": 2}}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0}),
    ):
        assert ray_driver.worker_resources(config_with(use_ray=True, **keys), available) == resources
    config = config_with(use_ray=True, ray_num_workers=3)
    message = r"resources_per_worker: 3 workers need GPU: 3 \(available: 2\). Reduce it, or ray_num_workers"
    with pytest.raises(ConfigError, match=message):
        ray_driver.worker_resources(config, {"GPU": 2.0})
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray_driver.worker_resources(config, {"GPU": 2.0}) == {"GPU": 1.0}
    assert "training waits for them: GPU: 3 (available: 2)" in capsys.readouterr().err
    note = "Starting 1 worker with Ray Train on the cluster at 10.0.0.1:6379 (GPU: 1, CPU: 4 each)."
    assert planned(0, {"use_ray": True, "resources_per_worker": {"GPU": 1, "CPU": 4}}).note == note


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


def test_the_command_of_a_launcher(shown, run_file):
    ours = ["--module", "ebft", "train", str(run_file)]
    two = f"--config_file {agent.NEUTRAL} --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    words = f"-m accelerate.commands.launch {two} --multi_gpu --main_process_port 0".split()
    assert shown(2, "seed=1") == [sys.executable, *words, *ours, "seed=1"]
    machines = "--launcher torchrun --num-machines 2 --machine-rank 1 --main-process-ip 10.0.0.1 -- --tee 3"
    words = "-m torch.distributed.run --nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1"
    assert shown(4, machines) == [sys.executable, *f"{words} --master-port 29500 --tee 3".split(), *ours]


def test_one_machine_and_cpu(shown, run_file, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    words = shown(0, "--launcher torchrun --num-processes 2")
    assert words[0] == "OMP_NUM_THREADS=4" and "--standalone --local-addr 127.0.0.1" in " ".join(words)
    words = " ".join(shown(0, "--launcher torchrun --num-processes 2 --main-process-port 7"))
    assert "--master-addr 127.0.0.1 --master-port 7" in words and "--standalone" not in words
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not shown(0, "--num-processes 2")[0].startswith("OMP_NUM_THREADS")
    assert shown(1) == [sys.executable, "-m", "ebft", "train", str(run_file)]
