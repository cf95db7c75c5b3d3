"""Settings that other settings override: one warning each names the key, and the config gets the value in effect."""

import re
from collections.abc import Iterator
from typing import Any

from ebft.config.axolotl import IGNORED_KEYS, PLUGINS
from ebft.config.keys.models import AdapterKeys, AttentionKeys
from ebft.data.transforms import equivalent_transform, trains_on
from ebft.errors import ConfigError, warn
from ebft.methods.base_config import RayKeys
from ebft.methods.method import MethodConfig, foreign_keys
from ebft.run.config.combinations import FOREIGN
from ebft.run.config.data import chat_templates, idle_keys, idle_stream_keys

SCHEDULES_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
# Keys of one method, and their values that describe what the others do anyway.
_HARMLESS = {"eval_sample_packing": (None, False), "batch_flattening": (False, "auto")}
_SHARED = "the completions of a prompt share one pass over it, and passes have no padding between them"
# Other names for values of attn_implementation.
_ATTENTION_FLAGS = {
    "flash_attention": "flash_attention_2",
    "flex_attention": "flex_attention",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
_VARIABLE = re.compile(r"\$\{[A-Za-z_]\w*\}|(^|/)\$[A-Za-z_]\w*(?=/|$)")
# Templates, formats, texts of tokens, regular expressions, and arguments of other libraries.
_ANY_TEXT = re.compile(
    r"template|format|separator|token|regex|pattern|lora_target|unfrozen|modules|kwargs|optim_args|deepspeed|system_prompt"
)


def resolve(config: MethodConfig) -> None:
    """Resolve `config` to the settings that the run uses; each change to a requested setting gives one warning."""
    config.attn_implementation = _resolve_attention(config)
    for flag in _ATTENTION_FLAGS:
        setattr(config, flag, None)
    for change in (_resolve_axolotl, _without_effect, _of_adapter, _resolve_transforms, _resolve_entries):
        for message in change(config):
            warn(message)
    config.method.resolve(config)
    if config.fsdp is None and config.fsdp_config:  # with fsdp_version, as configs for FSDP2 have it elsewhere
        config.fsdp = True
    if config.wandb_run_id and not config.wandb_name:
        config.wandb_name = config.wandb_run_id


def _resolve_attention(keys: AttentionKeys) -> str | None:
    """The requested implementation, or None. Raises ConfigError if several different ones are requested."""
    asked = {flag: value for flag, value in _ATTENTION_FLAGS.items() if getattr(keys, flag)}
    given = [f"{flag}: true" for flag in asked]
    if keys.attn_implementation is not None:
        asked["attn_implementation"] = keys.attn_implementation
        given.append(f"attn_implementation: {keys.attn_implementation}")
    chosen = set(asked.values())
    if len(chosen) > 1:
        raise ConfigError(f"More than one attn_implementation is set ({', '.join(given)}). Keep one.")
    return chosen.pop() if chosen else None


def _resolve_axolotl(config: MethodConfig) -> Iterator[str]:
    """Replace the text of a chat template and the plugins of axolotl by what they stand for; name ignored keys."""
    if config.chat_template_jinja is not None:
        config.chat_template, config.chat_template_jinja = config.chat_template_jinja, None
    replaced = [name for name in config.plugins if name.startswith(FOREIGN)]
    if "nemo_gym_enabled" in config.method.keys.model_fields:  # such methods replace NeMo Gym's plugin
        replaced = [name for name in replaced if name != f"{FOREIGN}nemo_gym.NemoGymPlugin"]
    for name in replaced:
        yield f"plugins: {name} has no effect: {PLUGINS[name.removeprefix(FOREIGN)]}."
    config.plugins = [name for name in config.plugins if name not in replaced]
    for key, ignored in IGNORED_KEYS.items():
        value = getattr(config, key)
        if key == "skip_prepare_dataset" and config.streaming:
            continue  # rows of a stream are not prepared
        if key in config.model_fields_set and value not in ignored.harmless:
            yield f"{key}: {value} has no effect: {ignored.reason}."


def _without_effect(c: MethodConfig) -> Iterator[str]:
    """Name the keys that have no effect with the others, and set them to what the run uses."""
    if found := dict(_variables(c.model_dump(exclude_unset=True))):
        given = ", ".join(f"{key}: {text!r:.100}" for key, text in found.items())
        yield f"{given}: environment variables are not replaced in configs, only by the shell on a command line."
    if c.activation_offloading and (not c.method.offloads_activations or c.torch_compile):
        c.activation_offloading = False
        other = "torch_compile" if c.method.offloads_activations else c.method.name
        yield f"activation_offloading: true has no effect with {other}. gradient_checkpointing: true saves memory."
    if c.fsdp_config is not None and c.fsdp_config.activation_checkpointing and c.gradient_checkpointing:
        c.gradient_checkpointing = False
        yield "gradient_checkpointing: true has no effect: fsdp_config.activation_checkpointing does the same."
    if (kernel := c.experts_implementation) in ("scattermoe", "sonicmoe"):
        c.experts_implementation = None
        yield f"experts_implementation: {kernel} is replaced with grouped_mm of transformers, if the machine has it."
    # Published configs often have a schedule of evaluations with `val_set_size: 0.0`.
    given = [key for key in ("eval_steps", "eval_on_start", "evals_per_epoch") if getattr(c, key)]
    given += ["eval_strategy"] if c.eval_strategy not in (None, "no") else []
    if given and not (c.test_datasets or c.val_set_size):
        yield (
            f"{', '.join(given)}: no effect because there is no held-out data, so nothing is evaluated during "
            "training. Set val_set_size or test_datasets."
        )
    given = [name for name in ("warmup_steps", "warmup_ratio") if getattr(c, name)]
    if given and c.lr_scheduler in SCHEDULES_WITHOUT_WARMUP and c.cosine_min_lr_ratio is None:
        other = ". Set constant_with_warmup" if c.lr_scheduler == "constant" else ""
        yield f"{given[0]}: no effect with lr_scheduler: {c.lr_scheduler}{other}."
    given = [name for name in RayKeys.model_fields if name in c.model_fields_set and name != "use_ray"]
    if given and not c.use_ray:
        yield f"{', '.join(given)}: no effect because use_ray is not set."
    for key in sorted(foreign_keys(c) & c.model_fields_set):
        if getattr(c, key) not in _HARMLESS.get(key, (None, False)):
            is_shared = key == "batch_flattening" and c.method.rows == "prompts"
            yield f"{key} has no effect: {_SHARED if is_shared else f'{c.method.name} does not read it'}."
    if c.log_rollouts == "all" and c.method.samples_per_group(c) is None:
        yield f"log_rollouts: all has no effect: {c.method.name} samples no rollouts."


def _variables(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The keys of texts that contain an environment variable, except those whose texts may contain any character."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _variables(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str) and _VARIABLE.search(value) and not _ANY_TEXT.search(key):
        yield key, value


def _of_adapter(config: MethodConfig) -> Iterator[str]:
    given = [name for name in AdapterKeys.model_fields if name in config.model_fields_set]
    if config.adapter is not None and config.lora_r is not None and config.lora_alpha is None:
        config.lora_alpha = 2.0 * config.lora_r
    if config.adapter is not None and config.unfrozen_parameters is not None:
        config.unfrozen_parameters = None
        yield "unfrozen_parameters has no effect with an adapter; lora_modules_to_save trains modules beside it."
    if config.adapter is None and given:
        yield f"{', '.join(given)}: no effect because adapter is not set (all weights are trained)."
    elif config.lora_target_linear and config.lora_target_modules is not None and config.lora_model_dir is None:
        yield (
            f"lora_target_modules: {', '.join(config.lora_target_modules)}: adapted in addition to all linear layers, "
            "which lora_target_linear: true selects."
        )


def _resolve_transforms(config: MethodConfig) -> Iterator[str]:
    """Replace transforms that give the other kind of rows with equivalent ones, so that a dataset suits all methods."""
    rows, used = config.required_rows, {}
    for section in ("datasets", "test_datasets"):
        resolved = []
        for entry in getattr(config, section):
            other = equivalent_transform(entry.type, rows.kind)
            if other:
                used[f"{section}.type: {entry.type}"] = other
            resolved.append(entry.model_copy(update={"type": other}) if other else entry)
        setattr(config, section, resolved)
    if used:
        pairs = ", ".join(f"{asked} is replaced with {other}" for asked, other in used.items())
        yield f"{pairs}: {trains_on(rows)}. The replacement reads the same columns."


def _resolve_entries(config: MethodConfig) -> Iterator[str]:
    """Use the chat template and its arguments of the datasets for the run; name their keys without effect."""
    config.chat_template = config.chat_template or next(iter(chat_templates(config)), None)
    own = [entry.chat_template_kwargs for entry in config.datasets]
    if config.chat_template_kwargs is None and own and all(kwargs == own[0] for kwargs in own):
        config.chat_template_kwargs = own[0]  # for prompts of ebft inference too
    if config.method.rows == "prompts":
        config.chat_template_kwargs = config.chat_template_kwargs or config.trl.chat_template_kwargs
        config.trl.chat_template_kwargs = config.chat_template_kwargs
    yield from idle_keys(config)
    yield from idle_stream_keys(config)
