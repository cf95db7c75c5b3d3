"""What no single key can tell: contradictions between keys, and settings that give way to others.

Contradictions raise a ConfigError that names both sides and the way out. Where a run goes on with
something else than was asked for, it says so in one warning that names the key.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ebft.config.attention import FLAGS, resolve_attention
from ebft.config.ignored import IGNORED, Ignored
from ebft.config.metrics import held_out_metrics
from ebft.config.model import AdapterKeys
from ebft.config.options import (
    DropoutOption,
    FeatureOptions,
    RewardOptions,
    StridedOptions,
    StructuredOptions,
    ThinkingOption,
    settle_single_sample,
)
from ebft.config.transforms import counterpart, trains_on
from ebft.errors import ConfigError
from ebft.fetch.models import as_folder, is_gguf

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig


def refuse_contradictions(config: "RunConfig") -> None:
    """Raise a ConfigError that lists every contradiction between the keys of `config`."""
    found = [message for rule in _RULES for message in rule(config)]
    if found:
        raise ConfigError("\n".join(found))


def _adapter(config: "RunConfig") -> Iterator[str]:
    if config.adapter is None or config.lora_model_dir is not None:
        return
    for key in ("lora_r", "lora_alpha"):
        if getattr(config, key) is None:
            example = "lora_r: 16 with lora_alpha: 32"
            yield f"adapter: {config.adapter} needs {key}. Set it, for example {example}."
    if config.lora_target_linear and config.lora_target_modules is not None:
        yield "lora_target_linear: true means every linear layer, but lora_target_modules names some. Keep one."
    elif not config.lora_target_linear and config.lora_target_modules is None:
        yield (
            f"adapter: {config.adapter} needs to know which modules to adapt. Set lora_target_linear: true, "
            "or name them in lora_target_modules."
        )


def _feature_device(config: "RunConfig") -> Iterator[str]:
    if config.rl == "ebft" and config.ebft.feature_device is not None and config.adapter is not None:
        yield (
            f"ebft.feature_device: {config.ebft.feature_device} has no effect with an adapter, since features come "
            "from the policy with its adapter disabled. Remove it."
        )


def _quantisation(config: "RunConfig") -> Iterator[str]:
    if config.load_in_4bit and config.load_in_8bit:
        yield "load_in_4bit and load_in_8bit are both true. Keep one of them."
    elif config.adapter == "qlora" and not config.load_in_4bit:
        yield "adapter: qlora trains on 4-bit weights. Add load_in_4bit: true, or set adapter: lora."
    elif config.load_in_4bit and config.adapter != "qlora":
        yield "load_in_4bit: true cannot be trained without its adapter. Set adapter: qlora, or remove it."
    elif config.load_in_8bit and config.adapter != "lora":
        yield "load_in_8bit: true cannot be trained without an adapter. Set adapter: lora, or remove it."


def _gguf(config: "RunConfig") -> Iterator[str]:
    file = config.base_model if config.gguf_file is None else f"{config.base_model}/{config.gguf_file}"
    if not is_gguf(file):
        return
    way_out = as_folder(file)
    if config.load_in_4bit or config.load_in_8bit:
        yield f"A GGUF file is loaded as dense weights, which load_in_4bit and load_in_8bit do not quantise. {way_out}"
    if config.is_structured and config.trl.use_vllm and config.trl.vllm_mode != "server":
        yield f"{file} is a GGUF file, and vLLM serves a folder of safetensors here. {way_out}"


def _ports(config: "RunConfig") -> Iterator[str]:
    """A server that training starts itself listens where the trainer connects."""
    ours, theirs = config.vllm.port, config.trl.vllm_server_port
    is_managed = config.uses_server and config.trl.vllm_mode == "managed"
    if is_managed and "port" in config.vllm.model_fields_set and theirs not in (None, ours):
        yield (
            f"vllm.port: {ours} and trl.vllm_server_port: {theirs}: with vllm_mode: managed the server listens on the "
            "one and the trainer connects to the other. Keep one of them."
        )


def _model_type(config: "RunConfig") -> Iterator[str]:
    if config.model_type is not None and not config.model_type.endswith("ForCausalLM"):
        yield (
            f"model_type: {config.model_type} is no causal language model, which is what is trained here. Remove it, "
            "or set AutoModelForCausalLM."
        )


def _precision(config: "RunConfig") -> Iterator[str]:
    if config.bf16 is True and config.fp16:
        yield "bf16 and fp16 are both true. Keep one of them."


def _budget(config: "RunConfig") -> Iterator[str]:
    if config.budget.flops is not None and config.torch_compile and not config.is_strided:
        yield "budget.flops cannot be counted inside a compiled model. Remove it, or torch_compile."


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
                f"{given[0]} contradicts {strategy}: {chosen}. Remove it (as an override: {given[0]}=), or set "
                f"{strategy}: steps."
            )


def _evaluation(config: "RunConfig") -> Iterator[str]:
    if config.test_datasets and config.val_set_size:
        yield "test_datasets and val_set_size are both set. Keep one of them."
    metric, known = config.metric_for_best_model, held_out_metrics(config)
    if metric is not None and metric.removeprefix("eval_") not in known:
        yield f"metric_for_best_model: {metric!r} is not measured in this run. Choose from {', '.join(known)}."
    if config.test_datasets or config.val_set_size:
        return
    if config.save_strategy == "best":
        yield "save_strategy: best needs held-out data. Set val_set_size or test_datasets, or save by steps or epoch."
    for key in ("eval_steps", "evals_per_epoch", "load_best_model_at_end", "metric_for_best_model"):
        if getattr(config, key):
            yield f"{key} needs held-out data. Set val_set_size or test_datasets, or remove it."
    if config.eval_strategy not in (None, "no"):
        yield "eval_strategy needs held-out data. Set val_set_size or test_datasets, or remove it."


def _resuming(config: "RunConfig") -> Iterator[str]:
    if config.resume_from_checkpoint and config.auto_resume_from_checkpoints:
        yield "resume_from_checkpoint and auto_resume_from_checkpoints are both set. Keep one of them."


def _processes(config: "RunConfig") -> Iterator[str]:
    if config.deepspeed and config.fsdp:
        yield "deepspeed and fsdp are both set. Keep one of them."
    if config.fsdp_config and not config.fsdp:
        yield "fsdp_config has no effect without fsdp. Add fsdp: true, or remove it."


_RULES: list[Callable[["RunConfig"], Iterator[str]]] = [
    _adapter,
    _feature_device,
    _quantisation,
    _gguf,
    _ports,
    _model_type,
    _precision,
    _budget,
    _schedule,
    _evaluation,
    _resuming,
    _processes,
]


def settle(config: "RunConfig") -> None:
    """Bring `config` to what will run; every change of what was asked for is one warning."""
    _settle_attention(config)
    _warn_ignored(config)
    _warn_without_adapter(config)
    _settle_transforms(config)
    if config.rl is None:
        _warn_without_rl(config)
    if config.rl == "ebft":
        _warn_other_mode(config)
    if config.is_strided:
        settle_single_sample(config.ebft)
        _warn_prompts(config)
        _settle_compile(config)
    if config.is_structured:
        _warn_structured(config)
    if config.wandb_run_id and not config.wandb_name:
        config.wandb_name = config.wandb_run_id


def _settle_attention(config: "RunConfig") -> None:
    config.attn_implementation = resolve_attention(config)
    for flag in FLAGS:
        setattr(config, flag, None)


def _settle_transforms(config: "RunConfig") -> None:
    """Let counterparts stand in for transforms of the other kind of rows, so that one dataset serves every method."""
    used: dict[str, str] = {}
    for section in ("datasets", "test_datasets"):
        entries = getattr(config, section)
        instead = [counterpart(entry.type, config) for entry in entries]
        used |= {f"{section}.type: {entry.type}": other for entry, other in zip(entries, instead) if other}
        settled = [
            entry.model_copy(update={"type": other}) if other else entry for entry, other in zip(entries, instead)
        ]
        setattr(config, section, settled)
    if used:
        pairs = ", ".join(f"{asked} becomes {other}" for asked, other in used.items())
        warnings.warn(f"{pairs}: {trains_on(config)}, and these are made of the same columns.", stacklevel=2)


def _warn_without_rl(config: "RunConfig") -> None:
    """One warning for the sections of other methods; transforms read `ebft.mask_thinking_ce` in this one too."""
    idle = [name for name in ("trl", "vllm") if name in config.model_fields_set]
    if config.ebft.model_fields_set - set(ThinkingOption.model_fields):
        idle.insert(0, "ebft")
    if config.budget.generated_tokens is not None:
        warnings.warn("budget.generated_tokens has no effect in plain fine-tuning, which samples none.", stacklevel=2)
    if idle:
        warnings.warn(
            f"{', '.join(idle)}: no effect, since rl is not set, which is plain fine-tuning. Energy-based fine-tuning "
            "is rl: ebft.",
            stacklevel=2,
        )


def _warn_ignored(config: "RunConfig") -> None:
    for key, (harmless, reason) in IGNORED.items():
        value = getattr(config, key)
        if key in config.model_fields_set and value not in harmless:
            warnings.warn(f"{key}: {value} has no effect: {reason}.", stacklevel=2)


def _warn_without_adapter(config: "RunConfig") -> None:
    given = [name for name in AdapterKeys.model_fields if name in config.model_fields_set]
    if config.adapter is None and given:
        reason = "adapter is not set, so all weights are trained"
        warnings.warn(f"{', '.join(given)}: no effect, since {reason}.", stacklevel=2)


def _warn_other_mode(config: "RunConfig") -> None:
    """One warning for each key that the chosen mode does not read."""
    shared = set(FeatureOptions.model_fields)
    strided = config.ebft.mode == "strided"
    foreign = set((StructuredOptions if strided else StridedOptions).model_fields) - shared
    found = [f"ebft.{key}" for key in sorted(foreign & config.ebft.model_fields_set)]
    if strided:
        found += [key for key in ("trl", "vllm") if key in config.model_fields_set]
    other = "structured" if strided else "strided"
    for key in found:
        reason = f"only {other} mode reads it"
        warnings.warn(f"{key} has no effect in {config.ebft.mode} mode: {reason}.", stacklevel=2)


def _warn_prompts(config: "RunConfig") -> None:
    if config.train_on_inputs:
        reason = "anchors and cross-entropy of a row with a prompt lie in its completion"
        warnings.warn(f"train_on_inputs: true has no effect in strided mode: {reason}.", stacklevel=2)


# Keys of `trl:` that change nothing here, at which values that needs no word, and why.
_WITHOUT_EFFECT = {
    "reward_num_workers": Ignored((None, 1), "reward functions run in the training process, on its main thread"),
    "replay_recompute_logps": Ignored((None, True), "there is no replay buffer"),
    "reroll_max_groups": Ignored((None, 1), "failed prompts are not tried again"),
    "streaming_partial_batch": Ignored((None, False), "rewards are computed group by group already"),
    "streaming_min_groups": Ignored((None,), "rewards are computed group by group already"),
}


def _warn_structured(config: "RunConfig") -> None:
    """One warning for each key that whole completions leave no room for."""
    for key, (harmless, reason) in _WITHOUT_EFFECT.items():
        if getattr(config.trl, key) not in harmless:
            warnings.warn(f"trl.{key} has no effect: {reason}.", stacklevel=2)
    given = config.trl.model_fields_set
    if not config.trl.use_vllm:
        idle = sorted(key for key in given if key.startswith("vllm_") and key != "vllm_guided_decoding_regex")
        if idle:
            warnings.warn(f"{', '.join(f'trl.{key}' for key in idle)}: no effect without use_vllm: true.", stacklevel=2)
    if "prefetch_depth" in given and not config.trl.async_prefetch:
        warnings.warn("trl.prefetch_depth has no effect without async_prefetch: true.", stacklevel=2)
    if config.rl == "grpo":
        _warn_grpo(config)
    for key in ("train_on_inputs", "sample_packing"):
        if getattr(config, key):
            warnings.warn(f"{key}: true has no effect on whole completions of prompts.", stacklevel=2)
    if config.uses_server and config.adapter is not None and config.trl.vllm_lora_sync is False:
        warnings.warn(
            "trl.vllm_lora_sync: false has no effect: an adapter is sent to vLLM as it is, with the same result.",
            stacklevel=2,
        )
    if "vllm" in config.model_fields_set and not config.trl.use_vllm:
        warnings.warn("vllm: has no effect without trl.use_vllm: true.", stacklevel=2)


def _warn_grpo(config: "RunConfig") -> None:
    """One warning for each key of `ebft:` that GRPO does not read."""
    read = set(DropoutOption.model_fields)
    if "feature_matching" in (config.trl.reward_funcs or []):
        read |= set(RewardOptions.model_fields)
    for key in sorted(config.ebft.model_fields_set - read):
        warnings.warn(f"ebft.{key} has no effect with rl: grpo and these rewards.", stacklevel=2)


def _settle_compile(config: "RunConfig") -> None:
    if config.torch_compile:
        config.torch_compile = False
        warnings.warn(
            "torch_compile: true is set to false in strided mode: attention over rollouts changes its layout "
            "in every batch, and compiling the model again for each costs more than it saves.",
            stacklevel=2,
        )
