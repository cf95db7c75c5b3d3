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
