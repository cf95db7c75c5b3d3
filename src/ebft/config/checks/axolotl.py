"""Keys that configs for axolotl carry: what contradicts them here, and the settings that they become."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ebft.config import rules
from ebft.config.axolotl import IN_CHUNKS
from ebft.run.keys import RATE_KEYS

if TYPE_CHECKING:
    from ebft.methods.method import MethodConfig

_SINGLE = {
    "dp_replicate_size": "models are sharded over all processes, or copied to each of them",
    "context_parallel_size": "sequences are not split over processes; lower sequence_len, or shard the model with fsdp",
    "tensor_parallel_size": "layers are not split over processes; shard the model with fsdp "
    "(vllm.tensor_parallel_size is that of a vLLM server)",
    "expert_parallel_size": "experts are not split over processes; shard the model with fsdp",
}
_BITSANDBYTES = {
    "llm_int8_has_fp16_weight": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "load_in_4bit": True,
    "load_in_8bit": True,
}
# Plugins of axolotl by the end of their names, and what takes their place.
_PLUGINS = {
    "liger.LigerPlugin": "liger_rope, liger_rms_norm, liger_glu_activation and liger_layer_norm are enough in SFT",
    "cut_cross_entropy.CutCrossEntropyPlugin": IN_CHUNKS,
    "kernels.KernelsPlugin": "experts are computed with transformers' own kernels; see experts_implementation",
    "nemo_gym.NemoGymPlugin": "nemo_gym_enabled: true is enough",
}
_OTHER_PLUGINS = {
    "spectrum": "list the parameters in unfrozen_parameters",
    "grokfast": "gradients are not filtered",
    "kd": "the loss has no teacher",
    "diffusion": "models are trained on the next token",
    "llm_compressor": "ebft quantize quantises a trained model",
    "lm_eval": "use ebft evaluate, or lm_eval with the trained model",
    "densemixer": "the router of the model is used unchanged",
}
_FOREIGN = "axolotl.integrations."


def carried_problems(config: "MethodConfig") -> Iterator[str]:
    """What contradicts these keys."""
    for key, reason in _SINGLE.items():
        if getattr(config, key) not in (None, 1):
            yield f"{key}: {getattr(config, key)} is not supported: {reason}. Set it to 1, or remove it."
    if config.dp_shard_size not in (None, 1) and not (config.fsdp or config.fsdp_config):
        yield f"dp_shard_size: {config.dp_shard_size} needs fsdp. Add fsdp: true, or remove it."
    if config.dataloader_prefetch_factor is not None and not config.dataloader_num_workers:
        yield "dataloader_prefetch_factor needs dataloader_num_workers of at least 1. Set it, or remove the factor."
    for key in ("torch_compile_backend", "torch_compile_mode"):
        if getattr(config, key) is not None and not config.torch_compile:
            yield f"{key} has no effect without torch_compile: true. Add it, or remove {key}."
    if config.loss_watchdog_patience is not None and config.loss_watchdog_threshold is None:
        yield "loss_watchdog_patience has no effect without loss_watchdog_threshold. Set it, or remove the patience."
    for key, value in (config.bnb_config_kwargs or {}).items():
        if key not in _BITSANDBYTES or value != _BITSANDBYTES[key]:
            yield (
                f"bnb_config_kwargs.{key}: {value} is not supported: weights are quantised to nf4 with double "
                "quantisation, or to int8, which `ebft merge-lora` repeats. Remove it."
            )
    yield from _rates(config)
    yield from _optimisation(config)
    yield from _chat_template(config)
    yield from _plugins(config)


def _rates(config: "MethodConfig") -> Iterator[str]:
    if config.embedding_lr is not None and config.embedding_lr_scale is not None:
        yield "embedding_lr and embedding_lr_scale are both set. Keep one of them."
    if config.loraplus_lr_ratio is not None and config.adapter is None:
        yield "loraplus_lr_ratio has no effect without an adapter. Set adapter: lora, or remove it."
    if config.loraplus_lr_embedding is not None and config.loraplus_lr_ratio is None:
        yield "loraplus_lr_embedding has no effect without loraplus_lr_ratio. Set it, or remove loraplus_lr_embedding."
    given = [key for key in RATE_KEYS if getattr(config, key) is not None]
    if given and config.deepspeed is not None:
        yield f"{given[0]} is not supported with deepspeed, which creates the optimizer. Remove one of them."


def _optimisation(config: "MethodConfig") -> Iterator[str]:
    if config.cosine_min_lr_ratio is not None and config.lr_scheduler != "cosine":
        yield f"cosine_min_lr_ratio needs lr_scheduler: cosine, not {config.lr_scheduler}. Change one of them."
    if config.neftune_noise_alpha is not None and not config.method.runs_plain_model:
        yield f"neftune_noise_alpha is not supported with {config.method.name}: {rules.NEFTUNE}. Remove it."
    if config.overrides_of_model_config.model_fields_set and not config.method.runs_plain_model:
        yield (
            f"overrides_of_model_config is not supported with {config.method.name}, whose loss has no term for the "
            "router. Remove it."
        )
    if config.early_stopping_patience is None:
        return
    if not (config.test_datasets or config.val_set_size):
        yield "early_stopping_patience needs held-out data. Set val_set_size or test_datasets, or remove it."
    elif config.eval_strategy == "no" or config.evals_per_epoch == 0:
        yield "early_stopping_patience needs evaluations. Set eval_strategy to steps or epoch, or remove it."


def _chat_template(config: "MethodConfig") -> Iterator[str]:
    if config.chat_template == "jinja" and config.chat_template_jinja is None:
        yield "chat_template: jinja needs the text of the template in chat_template_jinja. Set it."
    if config.chat_template_jinja is not None and config.chat_template not in (None, "jinja"):
        yield "chat_template and chat_template_jinja are both set. Keep one of them."


def _plugins(config: "MethodConfig") -> Iterator[str]:
    for name in config.plugins:
        if not name.startswith(_FOREIGN) or name.removeprefix(_FOREIGN) in _PLUGINS:
            continue
        reason = _OTHER_PLUGINS.get(name.removeprefix(_FOREIGN).partition(".")[0], "it does not run here")
        yield f"plugins: {name} is a plugin for axolotl that is not supported: {reason}. Remove it."


def resolve_carried(config: "MethodConfig") -> None:
    """Replace the text of a chat template and the plugins of axolotl by the settings that they stand for."""
    if config.chat_template_jinja is not None:
        config.chat_template, config.chat_template_jinja = config.chat_template_jinja, None
    replaced = [name for name in config.plugins if name.startswith(_FOREIGN) and not _is_of_method(name, config)]
    for name in replaced:
        reason = _PLUGINS[name.removeprefix(_FOREIGN)]
        warnings.warn(f"plugins: {name} has no effect: {reason}.", stacklevel=2)
    config.plugins = [name for name in config.plugins if name not in replaced]


def _is_of_method(name: str, config: "MethodConfig") -> bool:
    """NeMo Gym's plugin belongs to the methods with NeMo Gym's keys, which replace it."""
    return name == f"{_FOREIGN}nemo_gym.NemoGymPlugin" and "nemo_gym_enabled" in config.method.keys.model_fields
