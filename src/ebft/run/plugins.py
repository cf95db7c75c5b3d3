"""Plugins: classes of the user that follow a run, as callbacks of transformers and by the hooks of axolotl's plugins.

A hook of axolotl gets `cfg`, in which keys are attributes. Before training, a hook that fails ends the run; during and
after training, it is a warning unless `plugins_strict` is set.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl

from ebft.config.user_code import user_code
from ebft.config.user_functions import call_problem, find_function, plugin_values
from ebft.errors import ConfigError
from ebft.run.config.schema import RunConfig

SCORED = "on_rollouts_scored"
_OURS = ("rollouts", "rewards")  # the arguments of SCORED that a plugin of this package accepts
# Hooks of axolotl's plugins, with their arguments.
_DURING = {
    SCORED: ("cfg", "trainer", "prompts", "completions", "rewards", "advantages"),
    "post_train": ("cfg", "model"),
    "post_train_unload": ("cfg",),
}
_BEFORE = {
    "register": ("cfg",),
    "get_input_args": (),
    "pre_model_load": ("cfg",),
    "post_model_build": ("cfg", "model"),
    "pre_lora_load": ("cfg", "model"),
    "post_lora_load": ("cfg", "model"),
    "post_model_load": ("cfg", "model"),
    "add_callbacks_pre_trainer": ("cfg", "model"),
    "post_trainer_create": ("cfg", "trainer"),
    "create_optimizer": ("cfg", "trainer"),
    "create_lr_scheduler": ("cfg", "trainer", "optimizer", "num_training_steps"),
    "add_callbacks_post_trainer": ("cfg", "trainer"),
}
# Hooks that are asked before training, and may return nothing: their arguments, and why.
_REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "load_datasets": (("cfg", "preprocess"), "rows are read from datasets. Write them to a file, and list it there"),
    "get_trainer_cls": (("cfg",), "the method has a trainer of its own. Change it in post_trainer_create"),
    "get_training_args": (("cfg",), "training arguments are keys of the config. Set them there"),
    "get_training_args_mixin": ((), "training arguments are keys of the config. Return None"),
    "get_collator_cls_and_kwargs": (("cfg", "is_eval"), "the method makes its batches itself. Return None"),
    "get_adapter_capabilities": ((), "adapters are those of PEFT. Return an empty list"),
    "get_lora_config_kwargs": (("cfg",), "the adapter is described by the keys lora_ and peft_. Set them"),
}
HOOKS = {**_BEFORE, **{name: arguments for name, (arguments, _) in _REFUSED.items()}, **_DURING}
# Keyword arguments that transformers passes to every method of a callback, and to single ones.
_KEYWORDS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_ADDED = {"on_log": ("logs",), "on_evaluate": ("metrics",), "on_predict": ("metrics",)}


class PluginConfig(dict[str, Any]):
    """A config, or a section of one, whose keys are attributes and items; what is not set or not known is None.

    Keys of the config cannot be changed; others can be set, for example for another hook.
    """

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
    """The plugins of a run; created before anything is loaded.

    Raises ConfigError if a plugin fails there, or asks for what is not possible.
    """

    def __init__(self, config: RunConfig) -> None:
        self._strict, self._warned = config.plugins_strict, set[str]()
        self._config, self._plugins = config, dict[str, Any]()
        for name in config.plugins:
            found = find_plugin(name)
            with user_code(f"plugins: creating {name} without arguments", ConfigError):
                self._plugins[name] = found()
        self.cfg: PluginConfig = PluginConfig(config.model_dump() | self._own_values())
        self("register")
        for hook, (arguments, reason) in _REFUSED.items():
            for name, returned in self(hook, *(False for _ in arguments[1:])).items():
                if returned is not None and returned != {} and returned != []:
                    raise ConfigError(f"plugins: {name}.{hook} returned {returned!r:.80}, but {reason}.")

    def __call__(self, hook: str, *args: Any) -> dict[str, Any]:
        """Call a hook of all plugins that have it; returns what each plugin returned, by its name."""
        given = (self.cfg, *args) if HOOKS[hook][:1] == ("cfg",) else args
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
                warnings.warn(
                    f"{text} Training goes on without it; plugins_strict: true ends the run instead. This warning is "
                    "given once.",
                    stacklevel=2,
                )
        return None

    def _own_values(self) -> dict[str, Any]:
        """The keys that plugins declare with get_input_args, checked; and those of `plugin_args`."""
        given, values = self._config.plugin_args, dict[str, Any]()
        for name, plugin in self._plugins.items():
            values |= plugin_values(name, plugin, given)
        return given | values

    def follow(self, trainer: Trainer, num_training_steps: int) -> None:
        """Add callbacks and hooks to a trainer, and let plugins create the optimizer and its schedule.

        Raises ConfigError if the trainer has no rollouts for a plugin.
        """
        for name, plugin in self._plugins.items():
            if isinstance(plugin, TrainerCallback):
                trainer.add_callback(_guarded(plugin, name))
            if _has(type(plugin), SCORED):
                if not hasattr(trainer, "scored_rollouts"):
                    raise ConfigError(f"plugins: {name} has {SCORED}, but this method samples no rollouts. Remove it.")
                call = partial(self._call, name, SCORED)
                hook = call if _takes_entries(type(plugin)) else _by_sample(call, self.cfg, trainer)
                trainer.scored_rollouts.hooks.append(wraps(getattr(plugin, SCORED))(hook))
        self._add_callbacks(trainer, "add_callbacks_pre_trainer", trainer.model)
        self("post_trainer_create", trainer)
        self._create(trainer, "optimizer", Optimizer, trainer)
        if self._have("create_lr_scheduler"):
            self._create(trainer, "lr_scheduler", object, trainer, trainer.create_optimizer(), num_training_steps)
        self._add_callbacks(trainer, "add_callbacks_post_trainer", trainer)

    def _have(self, hook: str) -> bool:
        return any(_has(type(plugin), hook) for plugin in self._plugins.values())

    def _add_callbacks(self, trainer: Trainer, hook: str, *args: Any) -> None:
        for name, returned in self(hook, *args).items():
            for each in returned if isinstance(returned, list | tuple) else [] if returned is None else [returned]:
                if not isinstance(each, TrainerCallback):
                    raise ConfigError(
                        f"plugins: {name}.{hook} returned {each!r:.80}; it must return a list of objects of "
                        "transformers.TrainerCallback."
                    )
                trainer.add_callback(_guarded(each, f"{name}.{type(each).__name__}"))

    def _create(self, trainer: Trainer, what: str, kind: type, *args: Any) -> None:
        for name, created in self(f"create_{what}", *args).items():
            if created is None:
                continue
            config, key = self._config, "optimizer" if what == "optimizer" else "lr_scheduler"
            given = [each for each in ("fsdp", "fsdp_config", "deepspeed") if getattr(config, each)]
            given += ["lr_groups, embedding_lr or loraplus_lr_ratio"] if trainer.rate_of is not None else []
            if given:
                raise ConfigError(f"plugins: {name}.create_{what} cannot be used with {given[0]}. Set {key} instead.")
            if not isinstance(created, kind):
                raise ConfigError(
                    f"plugins: {name}.create_{what} returned {created!r:.80}, which is no {kind.__name__}."
                )
            setattr(trainer, what, created)


def _by_sample(call: Callable[..., Any], cfg: PluginConfig, trainer: Trainer) -> Callable[..., None]:
    """A function of `ScoredRollouts.hooks` that calls axolotl's hook: one value per sample of all processes, in lists.

    As in axolotl, only the first process calls it.
    """

    def hook(entries: list[dict[str, Any]], rewards: Tensor) -> None:
        is_strided = any("blocks" in entry for entry in entries)
        found = gather_object(list(_of_blocks(entries) if is_strided else _of_completions(entries, trainer)))
        if not trainer.is_world_process_zero():
            return
        names = dict.fromkeys(name for _, _, by_name, _ in found for name in by_name)
        call(
            cfg,
            trainer,
            [prompt for prompt, _, _, _ in found],
            [completion for _, completion, _, _ in found],
            {name: [_number(by_name.get(name)) for _, _, by_name, _ in found] for name in names},
            [advantage for _, _, _, advantage in found],
        )

    return hook


Sample = tuple[str, str, dict[str, float | None], float]  # prompt, completion, rewards by name, advantage


def _of_blocks(entries: list[dict[str, Any]]) -> Iterator[Sample]:
    """The samples of strided mode: each continues its document up to the anchor."""
    for entry in entries:
        for block in entry["blocks"]:
            for each in block["samples"]:
                rewards = {"feature_matching": each["rewards"]}
                yield entry["document"][: block["offset"]], each["completion"], rewards, each["advantages"]


def _of_completions(entries: list[dict[str, Any]], trainer: Any) -> Iterator[Sample]:
    """The completions of prompts, as the model saw them, without special tokens."""
    samples = [each for entry in entries for each in entry["samples"]]
    texts = partial(trainer.text_tokenizer.batch_decode, skip_special_tokens=True)
    rollouts = trainer.rollouts[: len(samples)]
    prompts, completions = texts([each.prompt_ids for each in rollouts]), texts([each.ids for each in rollouts])
    for prompt, completion, each in zip(prompts, completions, samples, strict=True):
        yield prompt, completion, each["rewards"], each["advantage"]


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # as TRL has it


def check_plugins(names: list[str]) -> None:
    """Raise ConfigError for names that are not classes of the expected kind; their modules are imported."""
    for name in names:
        find_plugin(name)


def find_plugin(name: str) -> type[Any]:
    """The class of a plugin. Raises ConfigError if it is none, or if a method cannot be called with its arguments."""
    try:
        found = find_function("plugins", name)
    except ConfigError as error:
        if "No module named 'axolotl" not in str(error):
            raise
        raise ConfigError(
            f"{error} A plugin needs no base class here: a class with the same methods works without axolotl's "
            "BasePlugin."
        ) from error
    hooks = [hook for hook in HOOKS if _has(found, hook)] if inspect.isclass(found) else []
    if not inspect.isclass(found) or not (issubclass(found, TrainerCallback) or hooks):
        raise ConfigError(
            f"plugins: {name} must be a class: a transformers.TrainerCallback, or one with a method "
            f"{SCORED}(rollouts, rewards) or another hook of plugins: {', '.join(HOOKS)}."
        )
    problem = call_problem(found, f"{found.__name__}()")
    if problem is not None:
        raise ConfigError(f"plugins: {name} {problem}. Plugins are created without arguments.")
    for hook in hooks:
        if _takes(found, hook, HOOKS[hook]) or (hook == SCORED and _takes_entries(found)):
            continue
        forms = [", ".join(("self", *HOOKS[hook]))]
        forms = [*forms, "self, rollouts, rewards"] if hook == SCORED else forms
        raise ConfigError(
            f"plugins: {name}.{hook} {_problem(found, hook, forms[0], HOOKS[hook])}. "
            f"Define it as {' or '.join(f'{hook}({form})' for form in forms)}."
        )
    for event, kwargs in _events(found):
        call = "self, args, state, control, **kwargs"
        problem = _problem(found, event, call, ("args", "state", "control"), kwargs)
        if problem is not None:
            raise ConfigError(f"plugins: {name}.{event} {problem}. Define it as {event}({call}).")
    return found


def _has(found: type[Any], hook: str) -> bool:
    """Whether a class has a hook of its own, not only that of a base class that declares all of them."""
    owner = next((each for each in found.__mro__ if hook in vars(each)), None)
    return owner is not None and owner.__name__ != "BasePlugin"


def _takes(found: type[Any], method: str, arguments: tuple[str, ...]) -> bool:
    return _problem(found, method, "", arguments) is None


def _takes_entries(found: type[Any]) -> bool:
    """Whether a class has the hook of this package, not the one of axolotl or a wrong form of that."""
    named = inspect.signature(getattr(found, SCORED)).parameters
    return "cfg" not in named and _takes(found, SCORED, _OURS)


def _problem(
    found: type[Any], method: str, call: str, arguments: tuple[str, ...], kwargs: dict[str, None] | None = None
) -> str | None:
    has_self = not isinstance(inspect.getattr_static(found, method), staticmethod | classmethod)
    given = (*(("self",) if has_self else ()), *arguments)
    return call_problem(getattr(found, method), f"{method}({call})", *given, **(kwargs or {}))


def _events(found: type[Any]) -> Iterator[tuple[str, dict[str, None]]]:
    """The methods of a callback that training calls, with their keyword arguments."""
    if issubclass(found, TrainerCallback):
        for event in (name for name in vars(TrainerCallback) if name.startswith("on_")):
            if getattr(found, event) is not getattr(TrainerCallback, event):
                yield event, dict.fromkeys((*_KEYWORDS, *_ADDED.get(event, ())))


def _guarded(callback: TrainerCallback, name: str) -> TrainerCallback:
    """The callback, whose methods name themselves in errors."""
    for event, _ in _events(type(callback)):
        with suppress(AttributeError, ValueError):  # a class with fixed attributes
            setattr(callback, event, _call_of(getattr(callback, event), f"plugins: {name}.{event}"))
    return callback


def _call_of(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with user_code(what, ConfigError):
            found = method(*args, **kwargs)
        if not isinstance(found, TrainerControl | None):
            raise ConfigError(
                f"{what} returned a {type(found).__name__}. It must return the TrainerControl, or nothing."
            )
        return found

    return call
