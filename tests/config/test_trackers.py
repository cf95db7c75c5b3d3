import warnings

import pytest

from ebft.errors import ConfigError
from ebft.run import reporting as module
from ebft.run.reporting import check_trackers, tracker_environment, trackers


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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"report_to": "swanlab"}, "report_to: swanlab is not installed. Run `pip install swanlab`"),
        ({"report_to": ["none", "clearml"]}, "report_to: clearml is not installed. Run `pip install clearml`"),
        ({"report_to": "dagshub"}, "report_to: dagshub is not installed. Run `pip install dagshub mlflow`"),
        ({"report_to": "kubeflow"}, "report_to: kubeflow requires a job of the Kubeflow trainer"),
        ({"use_wandb": True, "wandb_project": "p"}, "use_wandb: true, but wandb is not installed. Run `pip install wa"),
        ({"use_mlflow": True}, "use_mlflow: true, but mlflow is not installed. Run `pip install mlflow`, or set use_m"),
        ({"use_tensorboard": True}, "Run `pip install 'ebft.tensorboard.'`, or set use_tensorboard: false"),
    ],
)
def test_a_tracker_without_its_package_is_refused(make, installed, keys, message):
    installed("dagshub")
    with pytest.raises(ConfigError, match=message):
        check_trackers(make(**keys))
    installed("swanlab", "clearml", "dagshub", "mlflow", "wandb", "tensorboardX")
    if keys.get("report_to") != "kubeflow":
        check_trackers(make(**keys))


def test_every_tracker_of_transformers_is_checked(make, installed, monkeypatch):
    from ebft.transformers_internals import INTEGRATION_TO_CALLBACK

    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    installed()
    for name in INTEGRATION_TO_CALLBACK:
        with pytest.raises(ConfigError, match=f"report_to: {name} "):
            check_trackers(make(report_to=name))
