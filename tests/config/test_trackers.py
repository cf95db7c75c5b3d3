import warnings

import pytest

from ebft.run import trackers as module
from ebft.run.trackers import tracker_environment, trackers


@pytest.fixture
def installed(monkeypatch):
    """`installed("wandb")`: only these packages are found."""
    return lambda *names: monkeypatch.setattr(module, "find_spec", lambda name: name if name in names else None)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["none"]),
        ({"use_tensorboard": True}, ["tensorboard"]),
        ({"wandb_project": "p"}, ["wandb"]),
        ({"wandb_project": "p", "use_wandb": False}, ["none"]),
        ({"use_wandb": True, "use_trackio": True}, ["trackio", "wandb"]),
        ({"report_to": "mlflow", "use_tensorboard": True}, ["mlflow", "tensorboard"]),
        ({"report_to": ["none"], "use_tensorboard": True}, ["tensorboard"]),
    ],
)
def test_who_is_reported_to(make, installed, keys, expected):
    installed("tensorboard", "wandb", "trackio")
    assert trackers(make(**keys)) == expected


def test_a_missing_package_is_one_warning_with_its_install_command(make, installed):
    installed("tensorboard")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trackers(make(wandb_project="p", use_tensorboard=True)) == ["tensorboard"]
    assert len(caught) == 1
    assert "wandb_project" in str(caught[0].message) and "pip install wandb" in str(caught[0].message)


def test_wandb_reads_its_settings_from_the_environment(make):
    config = make(wandb_project="p", wandb_run_id="r", wandb_watch=False, wandb_mode="offline")
    assert tracker_environment(config) == {
        "WANDB_PROJECT": "p",
        "WANDB_RUN_ID": "r",
        "WANDB_NAME": "r",
        "WANDB_WATCH": "false",
        "WANDB_MODE": "offline",
    }
    assert tracker_environment(make()) == {}


def test_mlflow_and_comet_read_theirs_too(make, installed):
    keys = {"mlflow_tracking_uri": "http://host", "mlflow_experiment_name": "e", "hf_mlflow_log_artifacts": True}
    keys |= {"comet_workspace": "w", "comet_project_name": "p", "comet_experiment_key": "k", "comet_mode": "create"}
    assert tracker_environment(make(**keys, comet_online=False)) == {
        "MLFLOW_TRACKING_URI": "http://host",
        "MLFLOW_EXPERIMENT_NAME": "e",
        "HF_MLFLOW_LOG_ARTIFACTS": "true",
        "COMET_WORKSPACE": "w",
        "COMET_PROJECT_NAME": "p",
        "COMET_EXPERIMENT_KEY": "k",
        "COMET_MODE": "create",
        "COMET_START_ONLINE": "false",
    }
    installed("mlflow", "comet_ml")
    assert trackers(make(use_mlflow=True, use_comet=True)) == ["mlflow", "comet_ml"]
    installed()
    with pytest.warns(UserWarning, match="use_mlflow is set, but mlflow is not installed .pip install mlflow."):
        assert trackers(make(use_mlflow=True)) == ["none"]
