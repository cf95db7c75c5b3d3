"""The experiment trackers of a run, and the environment variables that wandb reads."""

import warnings
from importlib.util import find_spec
from typing import NamedTuple

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError


class Tracker(NamedTuple):
    """A tracker: its name in transformers, the packages that provide it, how to install it."""

    name: str
    packages: tuple[str, ...]
    install: str


_TENSORBOARD = Tracker("tensorboard", ("tensorboard", "tensorboardX"), "pip install 'ebft[tensorboard]'")
_WANDB = Tracker("wandb", ("wandb",), "pip install wandb")
_MLFLOW = Tracker("mlflow", ("mlflow",), "pip install mlflow")
_COMET = Tracker("comet_ml", ("comet_ml",), "pip install comet-ml")
_TRACKIO = Tracker("trackio", ("trackio",), "pip install trackio")
_TRACKERS = (_TENSORBOARD, _WANDB, _MLFLOW, _COMET, _TRACKIO)

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
    """Names for `report_to`; a requested tracker that is not installed is skipped with one warning."""
    names = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or [])
    for key, tracker in _asked(config).items():
        if tracker.name in names:
            continue
        if any(find_spec(package) for package in tracker.packages):
            names.append(tracker.name)
        else:
            reason = f"{tracker.name} is not installed ({tracker.install})"
            warnings.warn(f"{key} is set, but {reason}. The run continues without it.", stacklevel=2)
    names = [name for name in names if name != "none"]
    return names or ["none"]


def check_report_to(config: RunConfig) -> None:
    """Raise ConfigError for a name in `report_to` that transformers does not know, or whose package is missing."""
    names = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or [])
    for name in names:
        if name in ("none", "all"):
            continue
        tracker = next((tracker for tracker in _TRACKERS if tracker.name == name), None)
        if tracker is None:
            _check_other(name)
        elif not any(find_spec(package) for package in tracker.packages):
            raise ConfigError(f"report_to: {name} is not installed. Run `{tracker.install}`, or remove it.")


def _check_other(name: str) -> None:
    from ebft.over_transformers import INTEGRATION_TO_CALLBACK

    if name not in INTEGRATION_TO_CALLBACK:
        raise ConfigError(f"report_to: unknown tracker {name!r}. Choose from {', '.join(INTEGRATION_TO_CALLBACK)}.")


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
