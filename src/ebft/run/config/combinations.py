"""Combinations of keys: those that contradict each other are one ConfigError, which says how to resolve each.

Settings that other settings override get the value in effect, with one warning for each that names the key.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ebft.catalog import as_folder, is_gguf, unknown_template
from ebft.config import rules
from ebft.config.axolotl import IGNORED_KEYS, PLUGINS, SINGLE, UNSUPPORTED_PLUGINS
from ebft.config.keys.models import ROUNDED, AdapterKeys
from ebft.config.keys.run import RATE_KEYS
from ebft.config.rules import NEFTUNE
from ebft.config.section import changed_keys
from ebft.data.transforms import equivalent_transform, trains_on
from ebft.errors import ConfigError, warn
from ebft.methods.base_config import RayKeys, fsdp_problems, shipped_configs
from ebft.methods.method import MethodConfig, contradictory_selection, foreign_keys
from ebft.run.config.data import chat_templates, entry_conflicts, idle_keys, idle_stream_keys, stream_problems

FOREIGN = "axolotl.integrations."
_ROWS = re.compile(r"\[\d*:\d*\]$")


def _adapter(c: MethodConfig) -> Iterator[str]:
    if c.adapter is None or c.lora_model_dir is not None:
        return
    if c.lora_r is None:
        yield f"adapter: {c.adapter} needs lora_r. Set it, for example lora_r: 16."
    is_expression = isinstance(c.lora_target_modules, str)
    if c.lora_target_linear and is_expression:
        yield "lora_target_linear is true, but lora_target_modules is also set, to a regular expression. Keep one."
    if not (c.lora_target_linear or c.lora_target_modules or c.lora_target_linear_modules or c.lora_target_parameters):
        yield f"adapter: {c.adapter} needs target modules. Set lora_target_linear: true, or lora_target_modules."
    if c.lora_target_linear_modules and (c.lora_target_linear or is_expression):
        other = "lora_target_linear: true" if c.lora_target_linear else "a regular expression in lora_target_modules"
        yield f"lora_target_linear_modules is not supported with {other}. Keep one."
    if c.lora_target_parameters is not None:
        yield from expert_problems(c, "lora_target_parameters")


def expert_problems(config: MethodConfig, key: str) -> Iterator[str]:
    """What contradicts adapters of fused experts, which `key` selects, and PEFT does not refuse."""
    excluded = {
        "peft_layers_to_transform": "PEFT restricts modules only; name the layers, such as layers.1.mlp.experts",
        "deepspeed": "adapted parameters are replaced as a whole during the forward pass",
    }
    for other, reason in excluded.items():
        if getattr(config, other):
            yield f"{key} is not supported with {other}: {reason}. Remove one."
    if config.lora_dropout:
        yield f"{key} is not supported with lora_dropout, which PEFT refuses for parameters. Remove it."
    if config.fsdp_config and config.fsdp_config.auto_wrap_policy == "SIZE_BASED_WRAP":
        yield f"{key} is not supported with auto_wrap_policy: SIZE_BASED_WRAP, which gathers experts alone. Remove it."
    if config.peft_init_lora_weights == "orthogonal":
        yield f"{key} is not supported with peft_init_lora_weights: orthogonal, since experts are stacked. Remove one."
    if config.method.rows == "prompts" and config.trl.use_vllm:
        yield f"{key} is not supported with trl.use_vllm: vLLM does not load such adapters. Remove one."


def _is_set(config: MethodConfig, key: str) -> bool:
    """Whether a key has another value than its default, and is not switched off."""
    value = getattr(config, key)
    return value is not False and value != type(config).model_fields[key].get_default(call_default_factory=True)


# Two keys that exclude each other.
_EXCLUSIVE = (
    ("embedding_lr", "embedding_lr_scale"),
    ("warmup_steps", "warmup_ratio"),
    ("test_datasets", "val_set_size"),
    ("resume_from_checkpoint", "auto_resume_from_checkpoints"),
    ("deepspeed", "fsdp"),
)
# A key, and the key without which it has no effect.
_DEPENDENT = (
    ("torch_compile_backend", "torch_compile"),
    ("torch_compile_mode", "torch_compile"),
    ("loss_watchdog_patience", "loss_watchdog_threshold"),
    ("loraplus_lr_ratio", "adapter"),
    ("loraplus_lr_embedding", "loraplus_lr_ratio"),
)


def _both_set(c: MethodConfig) -> Iterator[str]:
    for first, second in _EXCLUSIVE:
        if _is_set(c, first) and _is_set(c, second):
            yield f"{first} and {second} are both set. Keep one."
    if c.chat_template_jinja is not None and c.chat_template not in (None, "jinja"):
        yield "chat_template and chat_template_jinja are both set. Keep one."
    if c.curriculum_sampling and c.group_by_length:
        yield "curriculum_sampling and group_by_length are two orders of the rows. Remove one."
    if c.sample_packing and c.group_by_length:
        yield "group_by_length groups rows by length, but sample_packing fills them up to sequence_len. Remove one."
    if c.bf16 is True and c.fp16:
        yield "bf16 and fp16 are both true. Keep one."
    kwargs, same = c.chat_template_kwargs, c.trl.chat_template_kwargs
    if None not in (kwargs, same) and kwargs != same:
        yield "chat_template_kwargs and trl.chat_template_kwargs differ, but are two names of one key. Keep one."


def _needs_another(c: MethodConfig) -> Iterator[str]:
    if c.adapter == "qlora" and not c.load_in_4bit:
        yield "adapter: qlora requires 4-bit base weights. Add load_in_4bit: true, or set adapter: lora."
    if c.load_in_4bit and c.adapter != "qlora":
        yield "load_in_4bit: true requires adapter: qlora. Set adapter: qlora, or remove load_in_4bit."
    if c.quantize_moe_experts and c.deepspeed is not None:
        yield "quantize_moe_experts is not supported with deepspeed. Remove one, or use fsdp."
    if c.quantize_moe_experts and c.fsdp_config and c.fsdp_config.cpu_ram_efficient_loading:
        yield "quantize_moe_experts needs cpu_ram_efficient_loading: false, since each process needs the scales."
    if c.load_in_8bit and c.adapter is None:
        yield "load_in_8bit: true requires adapter: lora. Set adapter: lora, or remove load_in_8bit."
    if c.qat is not None and (c.adapter is not None or c.rl is not None or c.reward_model or c.process_reward_model):
        yield "qat is for SFT of all weights. Remove it, and use ebft quantize afterwards."
    if c.fp8 and (c.adapter is not None or c.qat is not None or c.reward_model or c.process_reward_model):
        yield "fp8 is for training of all weights of a language model, without adapter and qat. Remove one."
    pair = c.qat and (c.qat.weight_dtype, c.qat.activation_dtype)
    if pair and pair not in ROUNDED:
        pairs = "; ".join(" and ".join(filter(None, pair)) for pair in ROUNDED)
        yield f"qat.weight_dtype: {pair[0]} is not possible with this activation_dtype. Pairs are {pairs}."
    elif pair and ROUNDED[pair] and c.qat.group_size not in (None, ROUNDED[pair]):
        yield f"qat.group_size is {ROUNDED[pair]} with these dtypes. Remove it."
    if pair and c.qat.quantize_embedding and pair[0] not in ("int8", "int4", "ternary"):
        yield "qat.quantize_embedding needs weight_dtype: int8, int4 or ternary. Remove it."
    if c.reinit_weights and c.adapter is not None:
        yield "reinit_weights: true would train an adapter of random weights that are not saved. Remove one."
    if c.quantize_moe_experts and not (c.load_in_4bit or c.load_in_8bit):
        yield "quantize_moe_experts: true requires load_in_4bit or load_in_8bit. Add one, or remove it."
    if c.dp_shard_size not in (None, 1) and not c.fsdp:
        yield f"dp_shard_size: {c.dp_shard_size} needs fsdp. Add fsdp: true, or remove it."
    if c.chat_template == "jinja" and c.chat_template_jinja is None:
        yield "chat_template: jinja needs the text of the template in chat_template_jinja. Set it."
    if not (c.test_datasets or c.val_set_size):
        for key in ("early_stopping_patience", "load_best_model_at_end", "metric_for_best_model"):
            if getattr(c, key):
                yield f"{key} needs held-out data. Set val_set_size or test_datasets, or remove it."
        if c.save_strategy == "best":
            yield "save_strategy: best needs held-out data. Set val_set_size or test_datasets, or use steps or epoch."
    elif c.early_stopping_patience is not None and (c.eval_strategy == "no" or c.evals_per_epoch == 0):
        yield "early_stopping_patience needs evaluations. Set eval_strategy to steps or epoch, or remove it."


def _excluded(c: MethodConfig) -> Iterator[str]:
    if c.neftune_noise_alpha is not None and not c.method.runs_plain_model:
        yield f"neftune_noise_alpha is not supported with {c.method.name}: {NEFTUNE}. Remove it."
    if c.overrides_of_model_config.model_fields_set and not c.method.runs_plain_model:
        yield f"overrides_of_model_config is not supported with {c.method.name}, which has no term for the router."
    section = "trl" if c.method.rows == "prompts" else "ebft"
    of_section = lambda key: key if key == "log_rollouts" else f"{section}.{key}"
    yield from rules.logged_rollouts(c.log_rollouts, getattr(c, section).log_completions, of_section)
    if c.use_ray and c.manages_server:
        yield "use_ray is incompatible with trl.vllm_mode: managed. Use `ebft vllm-serve`, and vllm_mode: server."
    if c.use_ray and c.ray_max_failures and c.save_only_model:
        yield "ray_max_failures restarts the run from its checkpoints, which save_only_model does not allow."


def refuse_contradictions(config: MethodConfig) -> None:
    """Raise a ConfigError that lists all contradictions between the keys of `config`."""
    checks = (contradictory_selection, _adapter, _both_set, _needs_another, _excluded, _of_axolotl, _model_type,
              _schedule, fsdp_problems, entry_conflicts, stream_problems, _chat_templates,
              config.method.conflicts)  # fmt: skip
    found = [message for check in checks for message in check(config)]
    if found:
        raise ConfigError("\n".join(found))


def _model_type(config: MethodConfig) -> Iterator[str]:
    ending, given = config.method.class_ending, config.model_type or ""
    keys = {"ForSequenceClassification": "reward_model", "ForTokenClassification": "process_reward_model"}
    if given.endswith((*keys, "ForCausalLM")) and not given.endswith(ending):
        other = next((f"set {key}: true, " for end, key in keys.items() if given.endswith(end)), "")
        yield (
            f"model_type: {given} does not match {config.method.name}, which trains a model of the class "
            f"AutoModel{ending}. Remove it, {other}or set AutoModel{ending}."
        )


def _schedule(config: MethodConfig) -> Iterator[str]:
    metric, known = config.metric_for_best_model, config.method.held_out_metrics(config)
    if metric is not None and metric.removeprefix("eval_") not in known:
        yield f"metric_for_best_model: {metric!r} is not computed in this run. Choose from {', '.join(known)}."
    for kind, per_epoch in (("save", "saves_per_epoch"), ("eval", "evals_per_epoch")):
        steps, strategy = f"{kind}_steps", f"{kind}_strategy"
        chosen = getattr(config, strategy)
        given = [key for key in (steps, per_epoch) if getattr(config, key) is not None]
        if len(given) == 2:
            yield f"{steps} and {per_epoch} are both set. Keep one."
        elif given and chosen not in (None, "steps", "best"):
            yield f"{given[0]} conflicts with {strategy}: {chosen}. Remove it (as an override: {given[0]}=)."


def _of_axolotl(config: MethodConfig) -> Iterator[str]:
    """What contradicts keys that configs for axolotl have."""
    for key, reason in SINGLE.items():
        if getattr(config, key) not in (None, 1):
            yield f"{key}: {getattr(config, key)} is not supported: {reason}. Set it to 1, or remove it."
    for pattern in config.unfrozen_parameters or ():
        if _ROWS.search(pattern):  # a class of characters, as a regular expression
            yield f"unfrozen_parameters: {pattern!r} selects rows, but parameters are trained whole. Remove the range."
    for key, value in changed_keys(config.bnb_config_kwargs):
        bits = key if key.startswith("load_in_") else f"load_in_{'4' if key.startswith('bnb_4bit') else '8'}bit"
        if not getattr(config, bits):
            yield f"bnb_config_kwargs.{key}: {value} has no effect without {bits}: true. Add it, or remove {key}."
    given = [key for key in RATE_KEYS if getattr(config, key) is not None]
    if given and config.deepspeed is not None:
        yield f"{given[0]} is not supported with deepspeed, which creates the optimizer. Remove one."
    file = config.model_name
    if is_gguf(file) and (config.load_in_4bit or config.load_in_8bit):
        yield f"load_in_4bit and load_in_8bit have no effect with GGUF files, which are loaded dense. {as_folder(file)}"
    for name in config.plugins:
        if name.startswith(FOREIGN) and name.removeprefix(FOREIGN) not in PLUGINS:
            reason = UNSUPPORTED_PLUGINS.get(name.removeprefix(FOREIGN).partition(".")[0], "it does not run here")
            yield f"plugins: {name} is a plugin for axolotl that is not supported: {reason}. Remove it."


def _chat_templates(config: MethodConfig) -> Iterator[str]:
    """A tokenizer has one template, which is saved with the model; the first dataset may name it for all."""
    given = chat_templates(config)
    chosen = config.chat_template or next(iter(given), None)
    for template, where in given.items():
        if template != chosen:
            yield f"{where}.chat_template: {template!r:.60} differs from {chosen!r:.60} of the config or a dataset."
    problem = None if chosen in (None, "jinja") else unknown_template(chosen)
    if problem is not None and re.fullmatch(r"\w+", chosen) and not Path(chosen).is_file():
        yield problem


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


def resolve(config: MethodConfig) -> None:
    """Resolve `config` to the settings that the run uses; each change to a requested setting gives one warning."""
    asked = {f"{flag}: true": value for flag, value in _ATTENTION_FLAGS.items() if getattr(config, flag)}
    if config.attn_implementation is not None:
        asked[f"attn_implementation: {config.attn_implementation}"] = config.attn_implementation
    if len(set(asked.values())) > 1:
        raise ConfigError(f"More than one attn_implementation is set ({', '.join(asked)}). Keep one.")
    config.attn_implementation = next(iter(asked.values()), None)
    for flag in _ATTENTION_FLAGS:
        setattr(config, flag, None)
    for change in (_resolve_axolotl, _without_effect, _of_adapter, _resolve_transforms, _resolve_entries):
        for message in change(config):
            warn(message)
    config.method.resolve(config)
    if config.max_memory and config.device_map is None:
        config.device_map = "auto"
    if config.wandb_run_id and not config.wandb_name:
        config.wandb_name = config.wandb_run_id


def _resolve_axolotl(config: MethodConfig) -> Iterator[str]:
    """Replace texts of chat templates, DeepSpeed configs and plugins by what they stand for; name ignored keys."""
    if config.chat_template_jinja is not None:
        config.chat_template, config.chat_template_jinja = config.chat_template_jinja, None
    named = config.deepspeed if isinstance(config.deepspeed, str) else ""
    if (ours := Path(named).stem) in shipped_configs() and named != ours and not Path(named).exists():
        yield f"deepspeed: {named} does not exist: it is replaced with {ours}, the file of this name that ebft ships."
        config.deepspeed = ours
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
    if c.activation_offloading and (not c.method.offloads_activations or c.torch_compile):
        c.activation_offloading = False
        other = "torch_compile" if c.method.offloads_activations else c.method.name
        yield f"activation_offloading: true has no effect with {other}. gradient_checkpointing: true saves memory."
    if c.deepspeed is not None and c.method.rows in ("preferences", "labelled", "comparisons", "steps"):
        c.deepspeed = None
        yield f"deepspeed has no effect with {c.method.name}: each process has the whole model, unless fsdp is set."
    if c.fsdp_config is not None and c.fsdp_config.activation_checkpointing:
        # accelerate's own gives weights other names, with which PEFT saves adapters without weights.
        c.gradient_checkpointing, c.fsdp_config.activation_checkpointing = True, False
    if (kernel := c.experts_implementation) in ("scattermoe", "sonicmoe"):
        c.experts_implementation = None
        yield f"experts_implementation: {kernel} is replaced with grouped_mm of transformers, if the machine has it."
    for key, other in _DEPENDENT:
        if _is_set(c, key) and not _is_set(c, other):
            setattr(c, key, type(c).model_fields[key].default)
            yield f"{key} has no effect without {other}."
    if c.cosine_min_lr_ratio is not None and c.lr_scheduler != "cosine":
        c.cosine_min_lr_ratio = None
        yield f"cosine_min_lr_ratio has no effect with lr_scheduler: {c.lr_scheduler}, only with cosine."
    # Published configs often have a schedule of evaluations with `val_set_size: 0.0`.
    given = [key for key in ("eval_steps", "eval_on_start", "evals_per_epoch") if getattr(c, key)]
    given += ["eval_strategy"] if c.eval_strategy not in (None, "no") else []
    if given and not (c.test_datasets or c.val_set_size):
        yield f"{', '.join(given)}: no effect because there is no held-out data. Set val_set_size or test_datasets."
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
            f"lora_target_modules: {', '.join(config.lora_target_modules)}: adapted, like all linear layers, which "
            "lora_target_linear: true selects."
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
