import pytest

from ebft.run import reporting as module
from ebft.run.reporting import tracker_environment, trackers


@pytest.fixture
def installed(monkeypatch):
    """`installed("wandb")`: only these packages are found."""
    return lambda *names: monkeypatch.setattr(module, "find_spec", lambda name: name if name in names else None)


@pytest.mark.parametrize(("keys", "expected"), [
    ({}, ["none"]), ({"wandb_project": "p"}, ["wandb"]), ({"wandb_project": "p", "use_wandb": False}, ["none"]),
    ({"use_wandb": True, "use_trackio": True}, ["trackio", "wandb"]),
    ({"report_to": "mlflow", "use_tensorboard": True}, ["mlflow", "tensorboard"]),
])  # fmt: skip
def test_who_is_reported_to(make, installed, keys, expected):
    installed("tensorboard", "wandb", "trackio")
    assert trackers(make(**keys)) == expected


def test_trackers_read_their_settings_from_the_environment(make, installed):
    config = make(wandb_project="p", wandb_run_id="r", wandb_watch=False, wandb_mode="offline")
    assert tracker_environment(config) == {"WANDB_PROJECT": "p", "WANDB_RUN_ID": "r", "WANDB_NAME": "r",
                                           "WANDB_WATCH": "false", "WANDB_MODE": "offline"}  # fmt: skip
    keys = {"mlflow_tracking_uri": "http://host", "mlflow_experiment_name": "e", "hf_mlflow_log_artifacts": True,
            "comet_workspace": "w", "comet_project_name": "p", "comet_experiment_key": "k", "comet_mode": "create",
            "comet_online": False}  # fmt: skip
    expected = {"MLFLOW_TRACKING_URI": "http://host", "MLFLOW_EXPERIMENT_NAME": "e", "HF_MLFLOW_LOG_ARTIFACTS": "true",
                "COMET_WORKSPACE": "w", "COMET_PROJECT_NAME": "p", "COMET_EXPERIMENT_KEY": "k",
                "COMET_MODE": "create", "COMET_START_ONLINE": "false"}  # fmt: skip
    assert tracker_environment(make(**keys)) == expected and tracker_environment(make()) == {}
    installed("mlflow", "comet_ml")
    assert trackers(make(use_mlflow=True, use_comet=True)) == ["mlflow", "comet_ml"]
