"""Keys of training through Ray Train, how such a run is started, and what is refused; none of this needs Ray."""

import pytest

from ebft.errors import ConfigError
from ebft.run.config.schema import RunConfig
from ebft.tools.launch import plan as planning
from ebft.tools.launch.plan import RAY, LaunchOptions, plan_launch
from ebft.tools.launch.ray_driver import worker_resources

ROWS = {"base_model": "some/model", "datasets": [{"path": "some/data", "type": "ebft_opencode.transform_strided"}]}


@pytest.fixture(autouse=True)
def with_ray(monkeypatch):
    """A machine with the package ray."""
    monkeypatch.setattr(planning, "find_spec", lambda name: name)


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


def test_options_of_a_launch_cannot_be_combined_with_ray():
    with pytest.raises(ConfigError, match="so this cannot be used: --num-processes. Set ray_num_workers"):
        planned(options={"num_processes": 2})


def test_a_local_ray_must_have_the_resources_and_a_cluster_may_grow(monkeypatch, capsys):
    for keys, available, resources in (
        ({}, {"CPU": 2.0, "GPU": 1.0}, {"GPU": 1.0}),
        ({}, {"CPU": 2.0}, {"CPU": 1.0}),
        ({"resources_per_worker": {"CPU": 2}}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0}),
    ):
        assert worker_resources(config_with(use_ray=True, **keys), available) == resources
    config = config_with(use_ray=True, ray_num_workers=3)
    message = r"resources_per_worker: 3 workers need GPU: 3 \(available: 2\). Reduce ray_num_workers"
    with pytest.raises(ConfigError, match=message):
        worker_resources(config, {"GPU": 2.0})
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert worker_resources(config, {"GPU": 2.0}) == {"GPU": 1.0}
    assert "training waits for them: GPU: 3 (available: 2)" in capsys.readouterr().err
