"""Settings that other settings override: one warning each names the key, and the config gets the value in effect."""

import re
import warnings
from collections.abc import Iterator
from typing import Any

from ebft.config.axolotl import IGNORED_KEYS, PLUGINS
from ebft.config.base import RayKeys
from ebft.config.checks.combinations import FOREIGN
from ebft.config.checks.data import chat_templates, idle_keys, idle_stream_keys
from ebft.data.transforms import equivalent_transform, trains_on
from ebft.errors import ConfigError
from ebft.methods.method import MethodConfig, foreign_keys
from ebft.models.keys import AdapterKeys, AttentionKeys

# Keys of one method, and their values that describe what the others do anyway.
_HARMLESS = {"eval_sample_packing": (None, False), "batch_flattening": (False, "auto")}


# Other names for values of attn_implementation.
_ATTENTION_FLAGS = {
    "flash_attention": "flash_attention_2",
    "flex_attention": "flex_attention",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "xformers_attention": "sdpa",
}


_VARIABLE = re.compile(r"\$\{[A-Za-z_]\w*\}|(^|/)\$[A-Za-z_]\w*(?=/|$)")


# Templates, formats, texts of tokens, regular expressions, and arguments of other libraries.
_ANY_TEXT = re.compile(
    r"template|format|separator|token|regex|pattern|lora_target|unfrozen|modules|kwargs|optim_args|deepspeed|system_prompt"
)


def resolve(config: MethodConfig) -> None:
    """Resolve `config` to the settings that the run uses; each change to a requested setting gives one warning."""
    _set_attention(config)
    _resolve_axolotl(config)
    _warn_of_variables(config)
    _warn_of_activations(config)
    _warn_of_adapter(config)
    _warn_without_held_out_data(config)
    _warn_without_ray(config)
    _resolve_transforms(config)
    _warn_of_other_methods(config)
    _resolve_entries(config)
    config.method.resolve(config)
    if config.fsdp is None and config.fsdp_config:  # with fsdp_version, as configs for FSDP2 have it elsewhere
        config.fsdp = True
    if config.wandb_run_id and not config.wandb_name:
        config.wandb_name = config.wandb_run_id


def _set_attention(config: MethodConfig) -> None:
    config.attn_implementation = _resolve_attention(config)
    if config.xformers_attention:
        warnings.warn(
            "xformers_attention: transformers has no xformers attention, so attn_implementation: sdpa is used, which "
            "has the same memory-efficient kernels.",
            stacklevel=2,
        )
    for flag in _ATTENTION_FLAGS:
        setattr(config, flag, None)


def _resolve_transforms(config: MethodConfig) -> None:
    """Replace transforms that give the other kind of rows with equivalent ones, so that a dataset suits all methods."""
    rows, used = config.required_rows, {}
    for section in ("datasets", "test_datasets"):
        entries = getattr(config, section)
        instead = [equivalent_transform(entry.type, rows.kind) for entry in entries]
        used |= {f"{section}.type: {entry.type}": other for entry, other in zip(entries, instead) if other}
        resolved = [
            entry.model_copy(update={"type": other}) if other else entry for entry, other in zip(entries, instead)
        ]
        setattr(config, section, resolved)
    if used:
        pairs = ", ".join(f"{asked} is replaced with {other}" for asked, other in used.items())
        warnings.warn(f"{pairs}: {trains_on(rows)}. The replacement reads the same columns.", stacklevel=2)


def _resolve_entries(config: MethodConfig) -> None:
    """Use the chat template and its arguments of the datasets for the run, and warn of their keys without effect."""
    config.chat_template = config.chat_template or next(iter(chat_templates(config)), None)
    own = [entry.chat_template_kwargs for entry in config.datasets]
    if config.chat_template_kwargs is None and own and all(kwargs == own[0] for kwargs in own):
        config.chat_template_kwargs = own[0]  # for prompts of ebft inference too
    if config.method.rows == "prompts":
        config.chat_template_kwargs = config.chat_template_kwargs or config.trl.chat_template_kwargs
        config.trl.chat_template_kwargs = config.chat_template_kwargs
    for message in (*idle_keys(config), *idle_stream_keys(config)):
        warnings.warn(message, stacklevel=3)


def _resolve_axolotl(config: MethodConfig) -> None:
    """Replace the text of a chat template and the plugins of axolotl by what they stand for; warn of ignored keys."""
    if config.chat_template_jinja is not None:
        config.chat_template, config.chat_template_jinja = config.chat_template_jinja, None
    replaced = [name for name in config.plugins if name.startswith(FOREIGN)]
    if "nemo_gym_enabled" in config.method.keys.model_fields:  # such methods replace NeMo Gym's plugin
        replaced = [name for name in replaced if name != f"{FOREIGN}nemo_gym.NemoGymPlugin"]
    for name in replaced:
        warnings.warn(f"plugins: {name} has no effect: {PLUGINS[name.removeprefix(FOREIGN)]}.", stacklevel=2)
    config.plugins = [name for name in config.plugins if name not in replaced]
    for key, (harmless, reason) in IGNORED_KEYS.items():
        value = getattr(config, key)
        if key == "skip_prepare_dataset" and config.streaming:
            continue  # rows of a stream are not prepared
        if key in config.model_fields_set and value not in harmless:
            warnings.warn(f"{key}: {value} has no effect: {reason}.", stacklevel=2)


def _warn_of_variables(config: MethodConfig) -> None:
    """Some programs replace `${NAME}` in YAML files; it would become a part of a path or the name of a run."""
    found = dict(_variables(config.model_dump(exclude_unset=True)))
    if found:
        given = ", ".join(f"{key}: {text!r:.100}" for key, text in found.items())
        warnings.warn(
            f"{given}: environment variables are not replaced in configs, and the text is used as it is. Write the "
            "value, or set the key on the command line, where the shell replaces them.",
            stacklevel=2,
        )


def _variables(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The keys of texts that contain an environment variable, except those whose texts may contain any character."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _variables(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _variables(item, f"{key}.{place}")
    elif isinstance(value, str) and _VARIABLE.search(value) and not _ANY_TEXT.search(key):
        yield key, value


def _warn_of_other_methods(config: MethodConfig) -> None:
    for key in sorted(foreign_keys(config) & config.model_fields_set):
        if getattr(config, key) in _HARMLESS.get(key, (None, False)):
            continue
        warnings.warn(f"{key} has no effect: {config.method.name} does not read it.", stacklevel=2)


def _warn_of_activations(config: MethodConfig) -> None:
    if config.activation_offloading and not config.method.offloads_activations:
        config.activation_offloading = False
        warnings.warn(
            f"activation_offloading: true has no effect with {config.method.name}, whose activations are not kept by "
            "TRL's hooks. Use gradient_checkpointing: true to save memory.",
            stacklevel=2,
        )


def _warn_of_adapter(config: MethodConfig) -> None:
    given = [name for name in AdapterKeys.model_fields if name in config.model_fields_set]
    if config.adapter is None and given:
        reason = "adapter is not set (all weights are trained)"
        warnings.warn(f"{', '.join(given)}: no effect because {reason}.", stacklevel=2)
    elif config.lora_target_linear and config.lora_target_modules is not None and config.lora_model_dir is None:
        warnings.warn(
            f"lora_target_modules: {', '.join(config.lora_target_modules)}: adapted in addition to all linear layers, "
            "which lora_target_linear: true selects.",
            stacklevel=2,
        )


def _warn_without_held_out_data(config: MethodConfig) -> None:
    """Published configs often have a schedule of evaluations with `val_set_size: 0.0`."""
    keys = ("eval_steps", "eval_on_start", "evals_per_epoch")
    given = [key for key in keys if getattr(config, key)]
    given += ["eval_strategy"] if config.eval_strategy not in (None, "no") else []
    if given and not (config.test_datasets or config.val_set_size):
        warnings.warn(
            f"{', '.join(given)}: no effect because there is no held-out data, so nothing is evaluated during "
            "training. Set val_set_size or test_datasets.",
            stacklevel=2,
        )


def _warn_without_ray(config: MethodConfig) -> None:
    given = [name for name in RayKeys.model_fields if name in config.model_fields_set and name != "use_ray"]
    if not config.use_ray and given:
        warnings.warn(f"{', '.join(given)}: no effect because use_ray is not set.", stacklevel=2)


def _resolve_attention(keys: AttentionKeys) -> str | None:
    """The requested implementation, or None. Raises ConfigError if several different ones are requested."""
    asked = {flag: value for flag, value in _ATTENTION_FLAGS.items() if getattr(keys, flag)}
    if keys.attn_implementation is not None:
        asked["attn_implementation"] = keys.attn_implementation
    chosen = set(asked.values())
    if len(chosen) > 1:
        given = ", ".join(f"{key}: {_as_given(key, value)}" for key, value in asked.items())
        raise ConfigError(
            f"More than one attention implementation is set ({given}). Keep one line: "
            f"attn_implementation: {' | '.join(sorted(chosen))}."
        )
    refused = [flag for flag, value in _ATTENTION_FLAGS.items() if getattr(keys, flag) is False and value in chosen]
    if refused:
        value = keys.attn_implementation
        raise ConfigError(f"{refused[0]}: false conflicts with attn_implementation: {value}. Remove one of them.")
    return chosen.pop() if chosen else None


def _as_given(key: str, value: str) -> str:
    return "true" if key in _ATTENTION_FLAGS else value
