"""Checks that involve several keys: contradictions between keys, and settings that other settings override.

Contradictions raise a ConfigError that names both keys and how to resolve the conflict. If a run continues with a
setting other than the one requested, one warning names the key.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ebft.catalog import as_folder, is_gguf
from ebft.config.axolotl import IGNORED
from ebft.config.checks.axolotl import carried_problems, resolve_carried
from ebft.config.checks.data import chat_templates, entry_conflicts, idle_keys, idle_stream_keys, stream_problems
from ebft.config.checks.processes import fsdp_problems
from ebft.config.tool_keys import RayKeys
from ebft.data.transforms import equivalent_transform, trains_on
from ebft.errors import ConfigError
from ebft.methods import contradictory_selection, foreign_keys
from ebft.models.keys import AdapterKeys, AttentionKeys

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

_ROWS = re.compile(r"\[\d*:\d*\]$")  # of a parameter, at the end of a name


def adapter_problems(config: "RunConfig") -> Iterator[str]:
    """What contradicts `adapter` and the keys that describe it."""
    if config.adapter is None or config.lora_model_dir is not None:
        return
    for key in ("lora_r", "lora_alpha"):
        if getattr(config, key) is None:
            example = "lora_r: 16 with lora_alpha: 32"
            yield f"adapter: {config.adapter} needs {key}. Set it, for example {example}."
    if config.lora_target_linear and isinstance(config.lora_target_modules, str):
        yield (
            "lora_target_linear: true selects every linear layer, but lora_target_modules is also set, to a regular "
            "expression. Keep one."
        )
    elif not config.lora_target_linear and config.lora_target_modules is None and config.lora_target_parameters is None:
        yield (
            f"adapter: {config.adapter} needs target modules. Set lora_target_linear: true, or list them in "
            "lora_target_modules."
        )
    yield from _layers(config)
    yield from _dora(config)
    yield from _parameters(config)


def _layers(config: "RunConfig") -> Iterator[str]:
    if config.peft_layers_pattern is not None and config.peft_layers_to_transform is None:
        yield "peft_layers_pattern has no effect without peft_layers_to_transform. Set it, or remove the pattern."
    if config.peft_layers_to_transform is not None and isinstance(config.lora_target_modules, str):
        yield (
            "peft_layers_to_transform is not supported with a regular expression in lora_target_modules. Select the "
            "layers in the expression, or list the modules."
        )
    if config.peft_init_lora_weights == "orthogonal" and config.lora_r is not None and config.lora_r % 2:
        yield f"peft_init_lora_weights: orthogonal requires an even lora_r, not {config.lora_r}. Change one of them."


def _dora(config: "RunConfig") -> Iterator[str]:
    if config.peft_use_dora and _uses_vllm(config):
        yield "peft_use_dora: true is not supported with trl.use_vllm: vLLM does not load DoRA adapters. Remove one."


def _parameters(config: "RunConfig") -> Iterator[str]:
    if config.lora_target_parameters is not None:
        yield from expert_problems(config, "lora_target_parameters")


def expert_problems(config: "RunConfig", key: str) -> Iterator[str]:
    """What contradicts adapters of fused experts, which `key` selects.

    PEFT replaces adapted parameters during the forward pass of their module.
    """
    changes = "adapted parameters are replaced as a whole during the forward pass"
    excluded = {
        f"lora_dropout: {config.lora_dropout:g}": (config.lora_dropout > 0, "the adapter has no input of its own"),
        "peft_use_dora: true": (config.peft_use_dora, "PEFT has no DoRA for them"),
        "peft_layers_to_transform": (
            config.peft_layers_to_transform is not None,
            "PEFT restricts modules only; name the layers, such as layers.1.mlp.experts.down_proj",
        ),
        "peft_init_lora_weights: orthogonal": (config.peft_init_lora_weights == "orthogonal", "experts are stacked"),
        "load_in_4bit": (config.load_in_4bit, "they must be dense"),
        "load_in_8bit": (config.load_in_8bit, "they must be dense"),
        "fsdp": (bool(config.fsdp or config.fsdp_config), changes),
        "deepspeed": (config.deepspeed is not None, changes),
        "trl.use_vllm": (_uses_vllm(config), "vLLM does not load such adapters"),
    }
    for other, (given, reason) in excluded.items():
        if given:
            yield f"{key} is not supported with {other}: {reason}. Remove one of them."


def unfrozen_problems(config: "RunConfig") -> Iterator[str]:
    """What contradicts `unfrozen_parameters`."""
    if config.unfrozen_parameters is None:
        return
    if config.adapter is not None:
        yield (
            "unfrozen_parameters selects the parameters of full fine-tuning, but adapter is set. Remove one of them; "
            "lora_modules_to_save trains modules in addition to an adapter."
        )
    for pattern in config.unfrozen_parameters:
        if _ROWS.search(pattern):
            yield (
                f"unfrozen_parameters: {pattern!r} selects rows of a parameter, but parameters are trained as a whole. "
                "Remove the range."
            )
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"unfrozen_parameters: {pattern!r} is not a valid regular expression: {error}."


def _uses_vllm(config: "RunConfig") -> bool:
    return config.method.rows == "prompts" and config.trl.use_vllm


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


def refuse_contradictions(config: "RunConfig") -> None:
    """Raise a ConfigError that lists all contradictions between the keys of `config`."""
    found = [message for rule in (*_RULES, config.method.conflicts) for message in rule(config)]
    if found:
        raise ConfigError("\n".join(found))


def _quantisation(config: "RunConfig") -> Iterator[str]:
    if config.load_in_4bit and config.load_in_8bit:
        yield "load_in_4bit and load_in_8bit are both true. Keep one of them."
    elif config.adapter == "qlora" and not config.load_in_4bit:
        yield "adapter: qlora requires 4-bit base weights. Add load_in_4bit: true, or set adapter: lora."
    elif config.load_in_4bit and config.adapter != "qlora":
        yield "load_in_4bit: true requires adapter: qlora. Set adapter: qlora, or remove load_in_4bit."
    elif config.load_in_8bit and config.adapter != "lora":
        yield "load_in_8bit: true requires adapter: lora. Set adapter: lora, or remove load_in_8bit."


def _gguf(config: "RunConfig") -> Iterator[str]:
    file = config.model_name
    if not is_gguf(file):
        return
    hint = as_folder(file)
    if config.load_in_4bit or config.load_in_8bit:
        yield f"load_in_4bit and load_in_8bit are not supported with GGUF files, which are loaded dense. {hint}"


def _model_type(config: "RunConfig") -> Iterator[str]:
    ending = config.method.class_ending
    if config.model_type is None or config.model_type.endswith(ending):
        return
    if ending != "ForCausalLM":
        yield (
            f"model_type: {config.model_type} does not match {config.method.name}, which trains a model of the class "
            f"AutoModel{ending}. Remove it, or set AutoModel{ending}."
        )
    elif config.model_type.endswith(("ForSequenceClassification", "ForTokenClassification")):
        key = "process_reward_model" if config.model_type.endswith("ForTokenClassification") else "reward_model"
        yield f"model_type: {config.model_type} is the class of a reward model. Set {key}: true, or remove model_type."
    else:
        yield (
            f"model_type: {config.model_type} is not a causal language model. Only causal language models are "
            "supported. Remove it, or set AutoModelForCausalLM."
        )


def _precision(config: "RunConfig") -> Iterator[str]:
    if config.bf16 is True and config.fp16:
        yield "bf16 and fp16 are both true. Keep one of them."


def _schedule(config: "RunConfig") -> Iterator[str]:
    if config.warmup_steps is not None and config.warmup_ratio is not None:
        yield "warmup_steps and warmup_ratio are both set. Keep one of them."
    for kind, per_epoch in (("save", "saves_per_epoch"), ("eval", "evals_per_epoch")):
        steps, strategy = f"{kind}_steps", f"{kind}_strategy"
        chosen = getattr(config, strategy)
        given = [key for key in (steps, per_epoch) if getattr(config, key) is not None]
        if len(given) == 2:
            yield f"{steps} and {per_epoch} are both set. Keep one of them."
        elif given and chosen not in (None, "steps", "best"):
            yield (
                f"{given[0]} conflicts with {strategy}: {chosen}. Remove it (as an override: {given[0]}=), or set "
                f"{strategy}: steps."
            )


def _evaluation(config: "RunConfig") -> Iterator[str]:
    if config.test_datasets and config.val_set_size:
        yield "test_datasets and val_set_size are both set. Keep one of them."
    metric, known = config.metric_for_best_model, config.method.held_out_metrics(config)
    if metric is not None and metric.removeprefix("eval_") not in known:
        yield f"metric_for_best_model: {metric!r} is not computed in this run. Choose from {', '.join(known)}."
    if config.test_datasets or config.val_set_size:
        return
    if config.save_strategy == "best":
        yield "save_strategy: best needs held-out data. Set val_set_size or test_datasets, or use steps or epoch."
    for key in ("load_best_model_at_end", "metric_for_best_model"):
        if getattr(config, key):
            yield f"{key} needs held-out data. Set val_set_size or test_datasets, or remove it."


def _resuming(config: "RunConfig") -> Iterator[str]:
    if config.resume_from_checkpoint and config.auto_resume_from_checkpoints:
        yield "resume_from_checkpoint and auto_resume_from_checkpoints are both set. Keep one of them."


def _processes(config: "RunConfig") -> Iterator[str]:
    if config.deepspeed and config.fsdp:
        yield "deepspeed and fsdp are both set. Keep one of them."
    if config.fsdp_config and not config.fsdp and (config.fsdp is not None or config.fsdp_version is None):
        yield "fsdp_config has no effect without fsdp. Add fsdp: true, or remove it."
    if config.fsdp or config.fsdp_config:
        yield from fsdp_problems(config)


def _ray(config: "RunConfig") -> Iterator[str]:
    if not config.use_ray:
        return
    if config.manages_server:
        yield (
            "use_ray is incompatible with trl.vllm_mode: managed, whose server needs GPUs that Ray does not reserve. "
            "Start it with `ebft vllm-serve`, and set trl.vllm_mode: server."
        )
    if config.ray_max_failures and config.save_only_model:
        yield (
            "ray_max_failures restarts the run from its checkpoints, which cannot be resumed with save_only_model: "
            "true. Remove one of them."
        )
    if config.ddp and config.ray_num_workers == 1:
        yield "ddp: true requires several processes, but ray_num_workers is 1. Increase it, or remove ddp."
    if config.fsdp and config.ray_num_workers == 1:
        yield "fsdp shards the model over several processes, but ray_num_workers is 1. Increase it, or remove fsdp."


def _chat_templates(config: "RunConfig") -> Iterator[str]:
    """A tokenizer has one template, which is saved with the model; the first dataset may name it for all of them."""
    given = chat_templates(config)
    chosen = config.chat_template or next(iter(given), None)
    for template, where in given.items():
        if template != chosen:
            yield (
                f"{where}.chat_template: {template!r:.60} differs from {chosen!r:.60} of the config or of another "
                "dataset. The model is saved with one template: set chat_template of the config, and remove it here."
            )


def _template_kwargs(config: "RunConfig") -> Iterator[str]:
    given = config.trl.chat_template_kwargs
    if None not in (given, config.chat_template_kwargs) and given != config.chat_template_kwargs:
        yield "chat_template_kwargs and trl.chat_template_kwargs differ, but are two names of one key. Keep one."


_RULES: list[Callable[["RunConfig"], Iterator[str]]] = [
    contradictory_selection,
    adapter_problems,
    unfrozen_problems,
    carried_problems,
    _quantisation,
    _gguf,
    _model_type,
    _precision,
    _schedule,
    _evaluation,
    _resuming,
    _processes,
    _ray,
    entry_conflicts,
    stream_problems,
    _chat_templates,
    _template_kwargs,
]


def resolve(config: "RunConfig") -> None:
    """Resolve `config` to the settings that the run uses; each change to a requested setting gives one warning."""
    _set_attention(config)
    resolve_carried(config)
    _warn_ignored(config)
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


def _set_attention(config: "RunConfig") -> None:
    config.attn_implementation = _resolve_attention(config)
    if config.xformers_attention:
        warnings.warn(
            "xformers_attention: transformers has no xformers attention, so attn_implementation: sdpa is used, which "
            "has the same memory-efficient kernels.",
            stacklevel=2,
        )
    for flag in _ATTENTION_FLAGS:
        setattr(config, flag, None)


def _resolve_transforms(config: "RunConfig") -> None:
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


def _resolve_entries(config: "RunConfig") -> None:
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


def _warn_ignored(config: "RunConfig") -> None:
    for key, (harmless, reason) in IGNORED.items():
        value = getattr(config, key)
        if key == "skip_prepare_dataset" and config.streaming:
            continue  # rows of a stream are not prepared
        if key in config.model_fields_set and value not in harmless:
            warnings.warn(f"{key}: {value} has no effect: {reason}.", stacklevel=2)


def _warn_of_variables(config: "RunConfig") -> None:
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


def _warn_of_other_methods(config: "RunConfig") -> None:
    for key in sorted(foreign_keys(config) & config.model_fields_set):
        if getattr(config, key) in _HARMLESS.get(key, (None, False)):
            continue
        warnings.warn(f"{key} has no effect: {config.method.name} does not read it.", stacklevel=2)


def _warn_of_activations(config: "RunConfig") -> None:
    if config.activation_offloading and not config.method.offloads_activations:
        config.activation_offloading = False
        warnings.warn(
            f"activation_offloading: true has no effect with {config.method.name}, whose activations are not kept by "
            "TRL's hooks. Use gradient_checkpointing: true to save memory.",
            stacklevel=2,
        )


def _warn_of_adapter(config: "RunConfig") -> None:
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


def _warn_without_held_out_data(config: "RunConfig") -> None:
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


def _warn_without_ray(config: "RunConfig") -> None:
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
