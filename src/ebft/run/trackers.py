"""The trackers that keys of a config ask for: their names, packages and environment variables."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import NamedTuple

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError


class Tracker(NamedTuple):
    """A tracker: its name in transformers, the packages that it needs (a|b: one of them), how to install it."""

    name: str
    packages: tuple[str, ...]
    install: str

    @property
    def is_installed(self) -> bool:
        return all(any(find_spec(name) for name in names.split("|")) for names in self.packages)


_TENSORBOARD = Tracker("tensorboard", ("tensorboard|tensorboardX",), "pip install 'ebft[tensorboard]'")
_WANDB = Tracker("wandb", ("wandb",), "pip install wandb")
_MLFLOW = Tracker("mlflow", ("mlflow",), "pip install mlflow")
_COMET = Tracker("comet_ml", ("comet_ml",), "pip install comet-ml")
_TRACKIO = Tracker("trackio", ("trackio",), "pip install trackio")
_OTHERS = (
    Tracker("azure_ml", ("azureml",), "pip install azureml-sdk"),
    Tracker("clearml", ("clearml",), "pip install clearml"),
    Tracker("codecarbon", ("codecarbon",), "pip install codecarbon"),
    Tracker("dagshub", ("dagshub", "mlflow"), "pip install dagshub mlflow"),
    Tracker("dvclive", ("dvclive",), "pip install dvclive"),
    Tracker("flyte", ("flytekit",), "pip install flytekit"),
    Tracker("neptune", ("neptune|neptune-client",), "pip install neptune"),
    Tracker("swanlab", ("swanlab",), "pip install swanlab"),
)
_TRACKERS = {each.name: each for each in (_TENSORBOARD, _WANDB, _MLFLOW, _COMET, _TRACKIO, *_OTHERS)}

# The names of trackers in transformers, in its order.
IN_TRANSFORMERS = (
    *("azure_ml", "comet_ml", "mlflow", "neptune", "tensorboard", "trackio", "wandb", "codecarbon"),
    *("clearml", "dagshub", "flyte", "dvclive", "swanlab", "kubeflow"),
)
_VARIABLES = {
    "mlflow_tracking_uri": "MLFLOW_TRACKING_URI",
    "mlflow_experiment_name": "MLFLOW_EXPERIMENT_NAME",
    "hf_mlflow_log_artifacts": "HF_MLFLOW_LOG_ARTIFACTS",
    "comet_workspace": "COMET_WORKSPACE",
    "comet_project_name": "COMET_PROJECT_NAME",
    "comet_experiment_key": "COMET_EXPERIMENT_KEY",
    "comet_mode": "COMET_MODE",
    "comet_online": "COMET_START_ONLINE",
}
_WANDB_KEYS = ("project", "entity", "name", "run_id", "watch", "log_model", "mode")


def trackers(config: RunConfig) -> list[str]:
    """Names for `report_to`, of installed trackers; without wandb, `wandb_project` gives one warning.

    The package of any other key must be installed, see `check_trackers`.
    """
    names = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or [])
    for key, tracker in _asked(config).items():
        if tracker.name in names:
            continue
        if tracker.is_installed:
            names.append(tracker.name)
        elif key == "wandb_project":
            reason = f"{tracker.name} is not installed ({tracker.install})"
            warnings.warn(f"{key} is set, but {reason}. The run continues without it.", stacklevel=2)
    names = [name for name in names if name != "none"]
    return names or ["none"]


def check_trackers(config: RunConfig) -> None:
    """Raise ConfigError for a tracker that transformers does not know, or whose package is missing.

    Without wandb, `wandb_project` alone gives a warning only (`trackers`): shared configs set it.
    """
    names = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or [])
    for name in names:
        if name in ("none", "all"):
            continue
        if name not in _TRACKERS:
            _check_other(name)
        elif not _TRACKERS[name].is_installed:
            raise ConfigError(f"report_to: {name} is not installed. Run `{_TRACKERS[name].install}`, or remove it.")
    for key, tracker in _asked(config).items():
        if key != "wandb_project" and not tracker.is_installed:
            raise ConfigError(
                f"{key}: true, but {tracker.name} is not installed. Run `{tracker.install}`, or set {key}: false."
            )


def _check_other(name: str) -> None:
    if name not in IN_TRANSFORMERS:
        raise ConfigError(f"report_to: unknown tracker {name!r}. Choose from {', '.join(IN_TRANSFORMERS)}.")
    if name == "kubeflow" and os.getenv("KUBEFLOW_TRAINER_SERVER_URL") is None:
        raise ConfigError(
            "report_to: kubeflow requires a job of the Kubeflow trainer, which sets KUBEFLOW_TRAINER_SERVER_URL. "
            "Remove it."
        )


def _asked(config: RunConfig) -> dict[str, Tracker]:
    """The trackers that keys other than report_to request, by key."""
    asked = {}
    if config.use_tensorboard:
        asked["use_tensorboard"] = _TENSORBOARD
    if config.use_trackio:
        asked["use_trackio"] = _TRACKIO
    if config.use_mlflow:
        asked["use_mlflow"] = _MLFLOW
    if config.use_comet:
        asked["use_comet"] = _COMET
    if config.use_wandb:
        asked["use_wandb"] = _WANDB
    elif config.use_wandb is None and config.wandb_project:
        asked["wandb_project"] = _WANDB
    return asked


def tracker_environment(config: RunConfig) -> dict[str, str]:
    """The environment variables that trackers and transformers read, for the keys that are set."""
    names = {f"wandb_{key}": f"WANDB_{key.upper()}" for key in _WANDB_KEYS} | _VARIABLES
    values = {name: getattr(config, key) for key, name in names.items()}
    return {name: _text(value) for name, value in values.items() if value is not None}


def _text(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()
