"""Classes of the user that follow a run (`plugins`): callbacks, and receivers of scored rollouts."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Trainer, TrainerCallback

from ebft.config.imports import find_function
from ebft.config.user_code import RAISED, what_happened
from ebft.errors import ConfigError

HOOK = "on_rollouts_scored"


def check_plugins(names: list[str]) -> None:
    """Raise ConfigError for names that are not classes of the expected kind; their modules are imported."""
    for name in names:
        _find(name)


def add_plugins(trainer: Trainer, names: list[str]) -> None:
    """Create the plugins, and add them to the trainer. Raises ConfigError if it has no rollouts for a plugin."""
    for name in names:
        try:
            plugin = _find(name)()
        except RAISED as error:
            raise ConfigError(f"plugins: creating {name} without arguments failed: {what_happened(error)}.") from error
        if isinstance(plugin, TrainerCallback):
            trainer.add_callback(plugin)
        if hasattr(plugin, HOOK):
            if not hasattr(trainer, "scored_rollouts"):
                raise ConfigError(f"plugins: {name} has {HOOK}, but this method samples no rollouts. Remove it.")
            trainer.scored_rollouts.hooks.append(getattr(plugin, HOOK))


def _find(name: str) -> type[Any]:
    found = find_function("plugins", name)
    if not inspect.isclass(found) or not (issubclass(found, TrainerCallback) or hasattr(found, HOOK)):
        raise ConfigError(
            f"plugins: {name} must be a class: a transformers.TrainerCallback, or one with a method "
            f"{HOOK}(rollouts, rewards)."
        )
    return found
