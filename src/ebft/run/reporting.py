"""What a run reports: run.json and the final report, trackers, the Hub, and plugins that follow it."""

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from transformers import Trainer, TrainerCallback, TrainerControl

from ebft.config.reference import changed_keys
from ebft.config.schema import RunConfig
from ebft.config.user_code import call_problem, find_function, user_code
from ebft.errors import ConfigError, SaveError, cause
from ebft.machine import installed_version
from ebft.methods import selecting_keys
from ebft.monitor.run_files import REPORT, RunFiles, State
from ebft.processes import is_main_process
from ebft.secrets import without_secrets, without_secrets_in_text
from ebft.trainer.pushing import commit, pushed_files

_REPORT = "ebft.tools.dashboard.report"  # by name: runs need no tools
PACKAGES = ("ebft", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm")


@contextmanager
def recorded(config: RunConfig) -> Iterator[RunFiles | None]:
    """Describe the run inside the block in `run.json`: running, then finished, stopped (Ctrl-C) or failed.

    Yields the callback that also writes the metrics, or None in processes other than the main one.
    """
    if not is_main_process():
        yield None
        return
    files = RunFiles(config.output_dir, description(config) | {"data_digests": data_hashes(config)})
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


def data_hashes(config: RunConfig) -> list[str | None]:
    """A hash of the files of each of `datasets`, by which `ebft evaluate` notices that they have changed."""
    from ebft.data.sources import content_digest  # imports datasets

    return [content_digest(entry) for entry in config.datasets]


def versions() -> dict[str, str]:
    """The versions of the installed packages that results depend on."""
    return {name: found for name in PACKAGES if (found := installed_version(name)) is not None}


class Tracker(NamedTuple):
    """A tracker: its name in transformers, the packages that it needs (a|b: one of them), how to install it."""

    name: str
    packages: tuple[str, ...]
    install: str

    @property
    def is_installed(self) -> bool:
        return all(any(find_spec(name) for name in names.split("|")) for names in self.packages)


_TRACKERS = {
    name: Tracker(name, packages, f"pip install {install}")
    for name, packages, install in (
        ("tensorboard", ("tensorboard|tensorboardX",), "'ebft[tensorboard]'"),
        ("wandb", ("wandb",), "wandb"),
        ("mlflow", ("mlflow",), "mlflow"),
        ("comet_ml", ("comet_ml",), "comet-ml"),
        ("trackio", ("trackio",), "trackio"),
        ("azure_ml", ("azureml",), "azureml-sdk"),
        ("clearml", ("clearml",), "clearml"),
        ("codecarbon", ("codecarbon",), "codecarbon"),
        ("dagshub", ("dagshub", "mlflow"), "dagshub mlflow"),
        ("dvclive", ("dvclive",), "dvclive"),
        ("flyte", ("flytekit",), "flytekit"),
        ("neptune", ("neptune|neptune-client",), "neptune"),
        ("swanlab", ("swanlab",), "swanlab"),
    )
}
_NAMES = {
    "use_tensorboard": "tensorboard",
    "use_trackio": "trackio",
    "use_mlflow": "mlflow",
    "use_comet": "comet_ml",
    "use_wandb": "wandb",
}

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
    names = _named(config)
    for key, tracker in _asked(config).items():
        if tracker.name in names:
            continue
        if tracker.is_installed:
            names.append(tracker.name)
        elif key == "wandb_project":
            reason = f"{tracker.name} is not installed ({tracker.install})"
            warnings.warn(f"{key} is set, but {reason}. The run continues without it.", stacklevel=2)
    return [name for name in names if name != "none"] or ["none"]


def check_trackers(config: RunConfig) -> None:
    """Raise ConfigError for a tracker that transformers does not know, or whose package is missing.

    Without wandb, `wandb_project` alone gives a warning only (`trackers`): shared configs set it.
    """
    for name in _named(config):
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
    from ebft.over_transformers import INTEGRATION_TO_CALLBACK

    if name not in INTEGRATION_TO_CALLBACK:
        raise ConfigError(f"report_to: unknown tracker {name!r}. Choose from {', '.join(INTEGRATION_TO_CALLBACK)}.")
    if name == "kubeflow" and os.getenv("KUBEFLOW_TRAINER_SERVER_URL") is None:
        raise ConfigError(
            "report_to: kubeflow requires a job of the Kubeflow trainer, which sets KUBEFLOW_TRAINER_SERVER_URL. "
            "Remove it."
        )


def _named(config: RunConfig) -> list[str]:
    return [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or [])


def _asked(config: RunConfig) -> dict[str, Tracker]:
    """The trackers that keys other than report_to request, by key."""
    asked = {key: _TRACKERS[name] for key, name in _NAMES.items() if getattr(config, key)}
    if config.use_wandb is None and config.wandb_project:
        asked["wandb_project"] = _TRACKERS["wandb"]
    return asked


def tracker_environment(config: RunConfig) -> dict[str, str]:
    """The environment variables that trackers and transformers read, for the keys that are set."""
    names = {f"wandb_{key}": f"WANDB_{key.upper()}" for key in _WANDB_KEYS} | _VARIABLES
    values = {name: getattr(config, key) for key, name in names.items()}
    text = lambda value: value if isinstance(value, str) else str(value).lower()
    return {name: text(value) for name, value in values.items() if value is not None}


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
    if not config.hub_model_id or not is_main_process():
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
