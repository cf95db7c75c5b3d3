"""The number of processes and the launcher, by options, config and machine."""

import warnings

import pytest

from ebft.errors import ConfigError
from ebft.run.config.schema import RunConfig
from ebft.tools.launch import plan as planning
from ebft.tools.launch.plan import LaunchOptions, plan_launch

ROWS = {"base_model": "some/model", "datasets": [{"path": "some/data", "type": "ebft_opencode.transform"}]}
MANAGED = {"rl": "ebft", "ebft": {"mode": "structured"}, "trl": {"use_vllm": True, "vllm_mode": "managed"}}
MANAGED |= {"vllm": {"tensor_parallel_size": 2}}
MACHINES = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1"}


@pytest.fixture
def planned(monkeypatch):
    """`planned(gpus, keys, **options)`: the plan on a machine with so many GPUs."""

    def plan(gpus, keys=None, **options):
        monkeypatch.setattr(planning, "visible_gpus", lambda: gpus)
        with warnings.catch_warnings(action="ignore"):
            config = RunConfig.from_dict({**ROWS, **(keys or {})})
        return plan_launch(LaunchOptions(**options), config)

    return plan


ALL = "Starting 4 processes with accelerate, one per GPU. --launcher python trains in one process."
ONE = "Training in one process on one of 4 GPUs, because of ddp: false."
SERVER = "with torchrun on 2 of 4 GPUs; the others are for the vLLM server."
OF_MACHINES = "with accelerate on machine 1 of 2 (counted from 0), one per GPU."
ON = lambda device: {"rl": "ebft", "ebft": {"mode": "strided", "feature_device": device}}


@pytest.mark.parametrize(
    "gpus, keys, options, launcher, processes, note",
    [
        (0, {}, {}, None, 1, ""),
        (0, {}, {"passed_on": ("--debug",)}, "accelerate", 1, ""),  # words for the launcher are never left out
        (4, {}, {}, "accelerate", 4, ALL),
        (4, {}, {"num_processes": 2}, "accelerate", 2, "2 processes with accelerate on 2 of 4 GPUs."),
        (0, {}, {"num_processes": 3}, "accelerate", 3, "Starting 3 processes with accelerate on CPU."),
        (4, {"ddp": False}, {}, None, 1, ONE),
        (4, ON("cuda:3"), {}, None, 1, ""),
        (4, MANAGED, {"launcher": "torchrun"}, "torchrun", 2, SERVER),
        (3, MANAGED, {}, None, 1, ""),  # the server takes two
        (4, {}, {**MACHINES, "num_processes": 8}, "accelerate", 8, OF_MACHINES),
        (0, {}, MACHINES, "accelerate", 2, ""),
    ],
)
def test_the_number_of_processes_and_the_line_about_it(planned, gpus, keys, options, launcher, processes, note):
    plan = planned(gpus, keys, **options)
    assert (plan.launcher, plan.processes) == (launcher, processes) and plan.note.endswith(note)
    assert plan.note == "" or gpus != 1


@pytest.mark.parametrize(
    "gpus, options, message",
    [
        (0, {**MACHINES, "machine_rank": 2}, "requires --machine-rank, 0 to 1"),
        (0, {**MACHINES, "num_processes": 3}, "must be a multiple of --num-machines 2. Use 2"),
        (0, {"num_processes": 2, "passed_on": ("--use_fsdp",)}, "--use_fsdp after --: ebft train sets it"),
        (2, {"num_processes": 3}, "--num-processes 3 exceeds the number of visible GPUs, 2"),
    ],
)
def test_options_that_cannot_work(planned, gpus, options, message):
    with pytest.raises(ConfigError, match=message):
        planned(gpus, **options)


def test_a_launched_process_launches_nothing(planned, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    plan = planned(4)
    assert plan.launcher is None and plan.note == ""
    with pytest.raises(ConfigError, match="started by a launcher"):
        planned(4, num_processes=2)


def test_the_words_of_options_are_those_of_the_command():
    options = LaunchOptions("torchrun", 4, 2, 0, "host", 7, ("--tee", "3"))
    expected = "--launcher torchrun --num-processes 4 --num-machines 2 --machine-rank 0 --main-process-ip host"
    assert options.words() == f"{expected} --main-process-port 7 -- --tee 3".split()
    assert LaunchOptions().words() == []
