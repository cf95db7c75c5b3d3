"""Plugins: classes of the user that follow a run, as callbacks of transformers and by the hooks of axolotl's plugins.

A hook of axolotl gets `cfg`, in which keys are attributes. Before training, a hook that fails ends the run; during and
after training, it is a warning unless `plugins_strict` is set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from math import nan
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers import Trainer, TrainerCallback

from ebft.config.user_functions import find_function, plugin_values, user_code
from ebft.errors import ConfigError, warn
from ebft.run.config.schema import RunConfig

SCORED = "on_rollouts_scored"
_DURING = (SCORED, "post_train", "post_train_unload")
# Hooks that are asked before training, and may return nothing: why.
_REFUSED = {
    "load_datasets": "rows are read from datasets. Write them to a file, and list it there",
    "get_trainer_cls": "the method has a trainer of its own. Change it in post_trainer_create",
    "get_training_args": "training arguments are keys of the config. Set them there",
    "get_training_args_mixin": "training arguments are keys of the config. Return None",
    "get_collator_cls_and_kwargs": "the method makes its batches itself. Return None",
    "get_adapter_capabilities": "adapters come from PEFT. Return an empty list",
    "get_lora_config_kwargs": "the adapter is described by the keys lora_ and peft_. Set them",
}
_WITH_FLAG = ("load_datasets", "get_collator_cls_and_kwargs")  # preprocess, is_eval
_WITHOUT_CONFIG = ("get_input_args", "get_training_args_mixin", "get_adapter_capabilities")
# Hooks of axolotl's plugins.
HOOKS = (
    *("register", "get_input_args", "pre_model_load", "post_model_build", "pre_lora_load", "post_lora_load"),
    *("post_model_load", "add_callbacks_pre_trainer", "post_trainer_create", "create_optimizer"),
    *("create_lr_scheduler", "add_callbacks_post_trainer", *_REFUSED, *_DURING),
)


class PluginConfig(dict[str, Any]):
    """A config or a section, whose keys are attributes and items, None if unset; its keys cannot be changed."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({key: _with_attributes(value) for key, value in values.items()})
        self.__dict__["_fixed"] = frozenset(values)

    def __missing__(self, key: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle look for
            raise AttributeError(name)
        return self[name]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.__dict__.get("_fixed", ()):
            raise ConfigError(f"a plugin cannot change {key} of the config by setting cfg.{key}. Set it in the config.")
        super().__setitem__(key, value)

    __setattr__ = __setitem__


def _with_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return PluginConfig(value)
    return [_with_attributes(item) for item in value] if isinstance(value, list) else value


class Plugins:
    """The plugins of a run; ConfigError if one fails when it is created, or asks for what is not possible."""

    def __init__(self, config: RunConfig) -> None:
        self._strict, self._warned = config.plugins_strict, set[str]()
        self._config, self._plugins = config, dict[str, Any]()
        for name in config.plugins:
            found = find_plugin(name)
            with user_code(f"plugins: creating {name} without arguments", ConfigError):
                self._plugins[name] = found()
        values = config.model_dump() | config.plugin_args
        for name, plugin in self._plugins.items():
            values |= plugin_values(name, plugin, config.plugin_args)
        self.cfg: PluginConfig = PluginConfig(values)
        self("register")
        for hook, reason in _REFUSED.items():
            for name, returned in self(hook, *([False] if hook in _WITH_FLAG else [])).items():
                if returned not in (None, {}, []):
                    raise ConfigError(f"plugins: {name}.{hook} returned {returned!r:.80}, but {reason}.")

    def __call__(self, hook: str, *args: Any) -> dict[str, Any]:
        """Call a hook of all plugins that have it; returns what each plugin returned, by its name."""
        given = args if hook in _WITHOUT_CONFIG else (self.cfg, *args)
        return {
            name: self._call(name, hook, *given) for name, plugin in self._plugins.items() if _has(type(plugin), hook)
        }

    def _call(self, name: str, hook: str, *args: Any) -> Any:
        what = f"plugins: {name}.{hook}"
        try:
            with user_code(what, ConfigError):
                return getattr(self._plugins[name], hook)(*args)
        except ConfigError as error:
            if hook not in _DURING or self._strict:
                raise
            if what not in self._warned:
                self._warned.add(what)
                text = str(error) if str(error).startswith(what) else f"{what}: {error}"
                warn(f"{text} Training goes on without it (plugins_strict: true ends it). This warning is given once.")
        return None

    def follow(self, trainer: Trainer, num_training_steps: int) -> None:
        """Add callbacks and hooks to a trainer; ConfigError if it has no rollouts for a plugin."""
        for name, plugin in self._plugins.items():
            if isinstance(plugin, TrainerCallback):
                trainer.add_callback(plugin)
            if _has(type(plugin), SCORED):
                if not hasattr(trainer, "scored_rollouts"):
                    raise ConfigError(f"plugins: {name} has {SCORED}, but this method samples no rollouts. Remove it.")
                call = partial(self._call, name, SCORED)
                is_of_axolotl = "cfg" in inspect.signature(getattr(plugin, SCORED)).parameters
                hook = _by_sample(call, self.cfg, trainer) if is_of_axolotl else call
                trainer.scored_rollouts.hooks.append(wraps(getattr(plugin, SCORED))(hook))
        self._add_callbacks(trainer, "add_callbacks_pre_trainer", trainer.model)
        self("post_trainer_create", trainer)
        self._create(trainer, "optimizer", trainer)
        if any(_has(type(plugin), "create_lr_scheduler") for plugin in self._plugins.values()):
            self._create(trainer, "lr_scheduler", trainer, trainer.create_optimizer(), num_training_steps)
        self._add_callbacks(trainer, "add_callbacks_post_trainer", trainer)

    def _add_callbacks(self, trainer: Trainer, hook: str, *args: Any) -> None:
        for returned in self(hook, *args).values():
            for each in returned if isinstance(returned, list | tuple) else [] if returned is None else [returned]:
                trainer.add_callback(each)

    def _create(self, trainer: Trainer, what: str, *args: Any) -> None:
        for name, created in self(f"create_{what}", *args).items():
            if created is None:
                continue
            config, key = self._config, "optimizer" if what == "optimizer" else "lr_scheduler"
            given = [each for each in ("fsdp", "fsdp_config", "deepspeed") if getattr(config, each)]
            given += ["lr_groups, embedding_lr, loraplus_lr_ratio or muon"] if trainer.arrange is not None else []
            if given:
                raise ConfigError(f"plugins: {name}.create_{what} cannot be used with {given[0]}. Set {key} instead.")
            setattr(trainer, what, created)


def _by_sample(call: Callable[..., Any], cfg: PluginConfig, trainer: Any) -> Callable[..., None]:
    """A function of `ScoredRollouts.hooks` that calls axolotl's hook: one value per sample of all processes, in lists.
    As in axolotl, only the first process calls it. In strided mode, each sample continues its document up to the
    anchor; completions of prompts are as the model saw them, without special tokens."""

    def hook(entries: list[dict[str, Any]], rewards: Tensor) -> None:
        found: list[tuple[str, str, dict[str, float | None], float]] = []  # prompt, completion, rewards, advantage
        for entry in entries:
            for block in entry.get("blocks", []):
                prompt = entry["document"][: block["offset"]]
                for each in block["samples"]:
                    rewarded = {"feature_matching": each["rewards"]}
                    found.append((prompt, each["completion"], rewarded, each["advantages"]))
        if not any("blocks" in entry for entry in entries):
            samples = [each for entry in entries for each in entry["samples"]]
            texts = partial(trainer.text_tokenizer.batch_decode, skip_special_tokens=True)
            rollouts = trainer.rollouts[: len(samples)]
            prompts, completions = texts([each.prompt_ids for each in rollouts]), texts([each.ids for each in rollouts])
            for prompt, completion, each in zip(prompts, completions, samples, strict=True):
                found.append((prompt, completion, each["rewards"], each["advantage"]))
        found = gather_object(found)
        if trainer.is_world_process_zero():
            names = dict.fromkeys(name for _, _, by_name, _ in found for name in by_name)
            prompts, completions, _, advantages = ([each[part] for each in found] for part in range(4))
            by_name = {name: [each.get(name) for _, _, each, _ in found] for name in names}
            numbers = {name: [nan if each is None else each for each in values] for name, values in by_name.items()}
            call(cfg, trainer, prompts, completions, numbers, advantages)

    return hook


def find_plugin(name: str) -> type[Any]:
    """The class of a plugin, whose module is imported. Raises ConfigError if it is none."""
    found = find_function("plugins", name)
    hooks = [hook for hook in HOOKS if _has(found, hook)] if inspect.isclass(found) else []
    if not inspect.isclass(found) or not (issubclass(found, TrainerCallback) or hooks):
        raise ConfigError(
            f"plugins: {name} must be a class: a transformers.TrainerCallback, or one with a method "
            f"{SCORED}(rollouts, rewards) or another hook of plugins: {', '.join(HOOKS)}."
        )
    return found


def _has(found: type[Any], hook: str) -> bool:
    """Whether a class has a hook of its own, not only the one of a base class that declares all hooks."""
    owner = next((each for each in found.__mro__ if hook in vars(each)), None)
    return owner is not None and owner.__name__ != "BasePlugin"
