"""Classes of the user that follow a run, `plugins:`: their checks, and how they are added to a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl

from ebft.config.user_code import user_code
from ebft.config.user_functions import call_problem, find_function
from ebft.errors import ConfigError

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
