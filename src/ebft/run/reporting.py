"""The files that describe a run in its output folder, from its start to its end."""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from transformers import Trainer, TrainerCallback, TrainerControl

from ebft.config.reference import changed_keys
from ebft.config.schema import RunConfig
from ebft.config.user_code import call_problem, find_function, user_code
from ebft.errors import ConfigError, SaveError, cause
from ebft.methods import selecting_keys
from ebft.monitor.run_files import REPORT, RunFiles, State
from ebft.secrets import without_secrets, without_secrets_in_text
from ebft.trainer.pushing import commit, pushed_files

_REPORT = "ebft.tools.dashboard.report"  # by name: runs need no tools
PACKAGES = ("ebft", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


@contextmanager
def recorded(config: RunConfig) -> Iterator[RunFiles | None]:
    """Describe the run inside the block in `run.json`: running, then finished, stopped (Ctrl-C) or failed.

    Yields the callback that also writes the metrics, or None in processes other than the main one.
    """
    if os.environ.get("RANK", "0") != "0":
        yield None
        return
    files = RunFiles(config.output_dir, description(config) | {"data_digests": data_digests(config)})
    files.start()
    try:
        yield files
    except KeyboardInterrupt:
        _end(config, files, "stopped")
        raise
    except BaseException as error:
        _end(config, files, "failed", without_secrets_in_text(f"{type(error).__name__}: {error}"))
        raise
    _end(config, files, "finished")


def _end(config: RunConfig, files: RunFiles, state: State, error: str | None = None) -> None:
    """Write the final state and the report; a report that fails is a warning."""
    if not files.end(state, error) and (Path(config.output_dir) / REPORT).is_file():
        return
    try:
        if find_spec("ebft.tools") is not None:
            importlib.import_module(_REPORT).write_report(Path(config.output_dir))
    except Exception as failure:  # the report must not change how the run ends
        warnings.warn(f"The report of the run was not written ({failure}).", stacklevel=2)


def method_of(config: RunConfig) -> str:
    """The values of the keys that select the method, such as "ebft strided"; its name if they are not text."""
    return " ".join(value for value in selecting_keys(config).values() if isinstance(value, str)) or config.method.name


def description(config: RunConfig) -> dict[str, Any]:
    """What run.json contains about a run in addition to its state, as JSON values."""
    return {
        "method": method_of(config),
        "model": without_secrets(config.base_model),
        "output_dir": config.output_dir,
        "config": without_secrets(config.model_dump(mode="json")),
        "changed": without_secrets(dict(changed_keys(config))),
        "versions": {"python": platform.python_version(), **versions()},
    }


def data_digests(config: RunConfig) -> list[str | None]:
    """A hash of the files of each of `datasets`, by which `ebft evaluate` notices that they have changed."""
    from ebft.data.sources import content_digest  # imports datasets

    return [content_digest(entry) for entry in config.datasets]


def versions() -> dict[str, str]:
    """The versions of the installed packages that results depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
    from ebft.transformers_internals import INTEGRATION_TO_CALLBACK

    if name not in INTEGRATION_TO_CALLBACK:
        raise ConfigError(f"report_to: unknown tracker {name!r}. Choose from {', '.join(INTEGRATION_TO_CALLBACK)}.")
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


_WHEN = {
    "end": "model, tokenizer and model card at the end",
    "every_save": "model, tokenizer and model card at every save and at the end",
    "checkpoint": "the same and the newest checkpoint, with its optimizer state, at every save",
    "all_checkpoints": "the same and every checkpoint, with its optimizer state",
}


def check_hub(config: RunConfig) -> None:
    """Create the repository `hub_model_id` on the main process, and print what will be pushed to it.

    Raises ConfigError if that fails. An existing repository that is public gives a warning, unless
    hub_private_repo is false.
    """
    if not config.hub_model_id or os.environ.get("RANK", "0") != "0":
        return
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        name = api.create_repo(config.hub_model_id, private=config.hub_private_repo, exist_ok=True).repo_id
        is_private = api.repo_info(name).private
    except Exception as error:  # the client's transport errors have no common public base class
        raise ConfigError(
            f"hub_model_id: {config.hub_model_id!r} cannot be created or reached on the Hub ({cause(error)}). Log in "
            "with `hf auth login`, correct the id, or remove hub_model_id to keep the model on this machine."
        ) from error
    print(f"Hub: {name} ({'private' if is_private else 'public'}), {_WHEN[config.hub_strategy]}", file=sys.stderr)
    if config.hub_private_repo and not is_private:
        warnings.warn(
            f"hub_model_id: the repository {name} exists already and is public, so everyone can read what is pushed. "
            "Make it private in its settings, choose another id, or set hub_private_repo: false.",
            stacklevel=2,
        )


def push(config: RunConfig, names: list[str], card: str, tokenizer: object = None) -> None:
    """Push the final model: those of the files `names` in the output folder that belong to a model, and its card.

    Raises SaveError, with the command that pushes by hand, if that fails.
    """
    folder = Path(config.output_dir)
    files = {path.name: path for path in pushed_files(folder, names, tokenizer)}
    try:
        commit(config.hub_model_id, files, "End of training", card)
    except Exception as error:  # the client's transport errors have no common public base class
        words = ["hf", "upload", config.hub_model_id, str(folder), "."]
        included = [word for name in files for word in ("--include", name)]
        raise SaveError(
            f"The model is saved in {folder}, but it was not pushed to {config.hub_model_id} ({cause(error)}). To push "
            f"it, run the same command again with auto_resume_from_checkpoints=true, which does not train again, or: "
            f"{shlex.join([*words, *included])}"
        ) from error


HOOK = "on_rollouts_scored"
# Keyword arguments that transformers passes to every method of a callback, and to single ones.
_KEYWORDS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_SETS_UP = ("on_init_end", "on_train_begin")  # where a plugin may change settings of the process
_ADDED = {"on_log": ("logs",), "on_evaluate": ("metrics",), "on_predict": ("metrics",)}


def check_plugins(names: list[str]) -> None:
    """Raise ConfigError for names that are not classes of the expected kind; their modules are imported."""
    for name in names:
        _find(name)


def add_plugins(trainer: Trainer, names: list[str]) -> None:
    """Create the plugins, and add them to the trainer. Raises ConfigError if it has no rollouts for a plugin."""
    for name in names:
        found = _find(name)
        with user_code(f"plugins: creating {name} without arguments", ConfigError, sets_up=True):
            plugin = found()
        for event, _, _ in _calls(found):
            with suppress(AttributeError, ValueError):  # a class with fixed attributes
                setattr(plugin, event, _guarded(getattr(plugin, event), f"plugins: {name}.{event}", event in _SETS_UP))
        if isinstance(plugin, TrainerCallback):
            trainer.add_callback(plugin)
        if hasattr(plugin, HOOK):
            if not hasattr(trainer, "scored_rollouts"):
                raise ConfigError(f"plugins: {name} has {HOOK}, but this method samples no rollouts. Remove it.")
            trainer.scored_rollouts.hooks.append(getattr(plugin, HOOK))


def _guarded(method: Callable[..., Any], what: str, sets_up: bool) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with user_code(what, ConfigError, sets_up):
            found = method(*args, **kwargs)
        if not what.endswith(f".{HOOK}") and not isinstance(found, TrainerControl | None):
            raise ConfigError(
                f"{what} returned a {type(found).__name__}. It must return the TrainerControl, or nothing."
            )
        return found

    return call


def _find(name: str) -> type[Any]:
    found = find_function("plugins", name)
    if not inspect.isclass(found) or not (issubclass(found, TrainerCallback) or hasattr(found, HOOK)):
        raise ConfigError(
            f"plugins: {name} must be a class: a transformers.TrainerCallback, or one with a method "
            f"{HOOK}(rollouts, rewards)."
        )
    problem = call_problem(found, f"{found.__name__}()")
    if problem is not None:
        raise ConfigError(f"plugins: {name} {problem}. Plugins are created without arguments.")
    for event, call, kwargs in _calls(found):
        has_self = not isinstance(inspect.getattr_static(found, event), staticmethod | classmethod)
        args = ("rollouts", "rewards") if event == HOOK else ("args", "state", "control")
        problem = call_problem(
            getattr(found, event), f"{event}({call})", *(("self",) if has_self else ()), *args, **kwargs
        )
        if problem is not None:
            raise ConfigError(f"plugins: {name}.{event} {problem}. Define it as {event}({call}).")
    return found


def _calls(found: type[Any]) -> Iterator[tuple[str, str, dict[str, None]]]:
    """The methods of a plugin that training calls: name, arguments as text, and keyword arguments."""
    if hasattr(found, HOOK):
        yield HOOK, "self, rollouts, rewards", {}
    if issubclass(found, TrainerCallback):
        for event in (name for name in vars(TrainerCallback) if name.startswith("on_")):
            if getattr(found, event) is not getattr(TrainerCallback, event):
                yield event, "self, args, state, control, **kwargs", dict.fromkeys((*_KEYWORDS, *_ADDED.get(event, ())))
