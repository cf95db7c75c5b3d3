"""Keys of training through Ray Train, how such a run is started, and what is refused; none of this needs Ray."""

import json
import sys

import pytest

from ebft.errors import ConfigError
from ebft.run.config.schema import RunConfig
from ebft.run.training import train
from ebft.tools.launch import plan as planning
from ebft.tools.launch.plan import RAY, LaunchOptions, plan_launch
from ebft.tools.launch.ray_driver import worker_resources
from tests.launch.test_plan import MANAGED

ROWS = {"base_model": "some/model", "datasets": [{"path": "some/data", "type": "ebft_opencode.transform_strided"}]}


@pytest.fixture(autouse=True)
def with_ray(monkeypatch):
    """A machine with the package ray."""
    monkeypatch.setattr(planning, "has_ray", lambda: True)


def config_with(**keys):
    return RunConfig.from_dict({**ROWS, **keys})


def planned(*, options=None, **keys):
    return plan_launch(LaunchOptions(**(options or {})), config_with(use_ray=True, **keys))


def test_the_plan_counts_workers_and_says_where_they_run(monkeypatch):
    plan = planned(ray_num_workers=2)
    assert (plan.launcher, plan.processes) == (RAY, 2)
    local = "Starting 2 workers with Ray Train on a local Ray (one GPU each, or one CPU if Ray has no GPUs)."
    cluster = "Starting 1 worker with Ray Train on the cluster at 10.0.0.1:6379 (GPU: 1, CPU: 4 each)."
    assert plan.note == local and plan_launch(LaunchOptions(), config_with()).launcher is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert planned(resources_per_worker={"GPU": 1, "CPU": 4}).note == cluster


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_processes": 2}, "--num-processes cannot be used. Set ray_num_workers"),
        ({"passed_on": ("--log-dir", "logs")}, "-- cannot be used"),
    ],
)
def test_options_of_other_launchers_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        planned(options=options)


@pytest.mark.parametrize(
    "has_ray, variables, message",
    [
        (True, {"LOCAL_RANK": "0"}, "use_ray: true starts the workers itself, but this process was started by"),
        (False, {}, r"use_ray requires the package ray: pip install 'ebft\[ray\]'"),
    ],
)
def test_machines_on_which_ray_is_not_started(monkeypatch, has_ray, variables, message):
    monkeypatch.setattr(planning, "has_ray", lambda: has_ray)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        planned()


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"resources_per_worker": {"GPU": 2}}, "invalid value GPU: 2; expected 1 or 0"),
        ({"ray_max_failures": 1, "save_only_model": True}, "ray_max_failures restarts the run from its checkpoints"),
        (MANAGED, "use_ray is incompatible with trl.vllm_mode: managed"),
    ],
)
def test_impossible_keys_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        config_with(use_ray=True, **keys)


def test_keys_without_use_ray_give_a_warning():
    with pytest.warns(UserWarning, match="^ray_num_workers, ray_max_failures: no effect because use_ray is not set"):
        config_with(ray_num_workers=2, ray_max_failures=1)


@pytest.mark.parametrize(
    "keys, available, resources",
    [
        ({}, {"CPU": 2.0, "GPU": 1.0}, {"GPU": 1.0}),
        ({}, {"CPU": 2.0}, {"CPU": 1.0}),
        ({"resources_per_worker": {"CPU": 2}}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0}),
    ],
)
def test_a_worker_has_a_gpu_where_there_are_some(keys, available, resources):
    assert worker_resources(config_with(use_ray=True, **keys), available) == resources


def test_a_local_ray_must_have_the_resources_and_a_cluster_may_grow(monkeypatch, capsys):
    config = config_with(use_ray=True, ray_num_workers=3)
    message = r"resources_per_worker: 3 workers need GPU: 3 \(available: 2\). Reduce ray_num_workers"
    with pytest.raises(ConfigError, match=message):
        worker_resources(config, {"GPU": 2.0})
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert worker_resources(config, {"GPU": 2.0}) == {"GPU": 1.0}
    assert "training waits for them: GPU: 3 (available: 2)" in capsys.readouterr().err


def test_training_from_python_refuses_the_key_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="use_ray: true starts workers, which only the command ebft train does"):
        train(config_with(use_ray=True))


def test_a_dry_run_prints_the_workers_and_the_command_and_a_sweep_those_of_each_run(ebft, tmp_path):
    path, sweep = tmp_path / "run.yaml", tmp_path / "sweep.yaml"
    path.write_text(json.dumps({**ROWS, "use_ray": True, "output_dir": str(tmp_path / "out"), "val_set_size": 2}))
    done = ebft("train", path, "ray_num_workers=2", "--dry-run")
    note, command = done.stdout.splitlines()
    assert done.exit_code == 0, done.stderr
    assert note.startswith("# Starting 2 workers with Ray Train on a local Ray")
    assert command == f"{sys.executable} -m ebft train {path} ray_num_workers=2"
    sweep.write_text("ray_num_workers: [1, 2]\n")
    done = ebft("train", path, "--sweep", sweep, "--dry-run")
    assert done.exit_code == 0, done.stderr
    started = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert started == ["# ray_num_workers=1", "# ray_num_workers=2"]
    refused = ebft("train", path, "--sweep", sweep, "--num-processes", 2)
    assert refused.exit_code == 2 and "--num-processes cannot be used" in refused.stderr
    assert not (tmp_path / "out").exists()
