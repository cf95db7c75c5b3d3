"""Loading the base model with the dtype, device placement and attention implementation of the config."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    GenerationConfig,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ebft.catalog import as_folder, base_name, is_gguf
from ebft.config.keys.models import ModelSettings
from ebft.errors import ConfigError, ModelError, doing, prefixed, shortened, warn
from ebft.models.adapter import attach_adapter, check_saves_resized
from ebft.models.causal_lm import LANGUAGE, HeadType, unwrap_adapter
from ebft.models.pretrained import GENERATION_CONFIG, find_base_model, find_model, pretrained_config, pretrained_model
from ebft.models.weights import prepare_float8, prepare_rounding, quantise_experts
from ebft.run_files import keys_of_base
from ebft.transformers_internals import is_flash_attn_2_available, is_flash_attn_3_available

Settings = TypeVar("Settings", bound=ModelSettings)

# Settings of generation that have no effect without sampling.
_OF_SAMPLING = ("temperature", "top_p", "min_p", "top_h", "typical_p", "top_k", "epsilon_cutoff", "eta_cutoff")


def load_model(
    config: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    head: HeadType = LANGUAGE,
    tell: Callable[[str, Any], Any] = lambda hook, model: None,
) -> PreTrainedModel | PeftModel:
    """The model to train: the base model with a head, and with an adapter if the config sets one. `tell` is called with
    the names of plugins' hooks and the model, when it is built and when it has its adapter."""
    config = usable_quantisation(config)
    base = load_base_model(config, tokenizer, head)
    if config.adapter is None and base.can_generate() and base.generation_config is not None:
        _make_saveable(base.generation_config, config.base_model)
    tell("post_model_build", base)
    if config.adapter is not None:
        tell("pre_lora_load", base)
    model = attach_adapter(base, config)
    if config.quantize_moe_experts and _is_quantised(config) and not quantise_experts(model, config):
        warn("quantize_moe_experts has no effect: the model has no fused experts.")
    size = load_model_config(config).get_text_config().vocab_size
    if config.lora_model_dir is None:  # a saved adapter may have the rows
        _warn_of_tokens_without_embedding(config, tokenizer, size)
    if config.adapter is not None:
        key = "lora_target_modules" if config.lora_model_dir is None else "lora_model_dir"
        check_saves_resized(model, size, key)
        _warn_of_untrained_tokens(config, model, tokenizer, size)
        tell("post_lora_load", model)
    tell("post_model_load", model)
    return model


def load_base_model(
    config: ModelSettings, tokenizer: PreTrainedTokenizerBase, head: HeadType = LANGUAGE
) -> PreTrainedModel:
    """The model `base_model`, with embeddings resized to the tokenizer's vocabulary. The head of a classifier starts
    from random values unless the weights have one. Raises ModelError if the model cannot be found or loaded."""
    name, model_config = find_base_model(config), load_model_config(config)
    file, size = base_name(config.base_model, config.gguf_file), model_config.get_text_config().vocab_size
    # New embeddings are saved with an adapter only if PEFT finds the config.json of the base model to compare with.
    if config.adapter is not None and is_gguf(file) and len(tokenizer) > size:
        raise ModelError(f"special_tokens: an adapter of a GGUF file does not save new tokens. {as_folder(file)}")
    if head.num_labels is not None:
        model_config.num_labels = head.num_labels
        model_config.classifier_dropout = 0.0  # of the head for tokens: as TRL trained process reward models
    options = {
        "dtype": weights_dtype(config),
        "attn_implementation": usable_attention(config.attn_implementation),
        "device_map": config.device_map,
        "max_memory": config.max_memory,
        "quantization_config": quantisation_config(config, model_config) or _dequantised(config, model_config),
        "experts_implementation": config.experts_implementation,
    }
    with prefixed("base_model"), doing(f"loading base_model: {config.base_model}"):
        model = pretrained_model(
            name,
            head,
            may_lack_head=True,
            config=model_config,
            revision=config.revision_of_model,
            trust_remote_code=config.trust_remote_code,
            **{key: value for key, value in options.items() if value is not None},
        )
    if isinstance(options["quantization_config"], Mxfp4Config):  # which dequantises to bfloat16
        model.to(options["dtype"])
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Else bitsandbytes repacks weights in the first pass without gradients, for products without a backward.
            module.support_avx512bf16_for_cpu = False
    if config.reinit_weights:
        model.load_state_dict(type(model)(model.config).state_dict())
    _fit_vocabulary(config, model, tokenizer)
    if config.qat is not None:
        prepare_rounding(model, config.qat)
    if config.fp8:
        prepare_float8(model)
    return model


def _make_saveable(found: GenerationConfig, name: str) -> None:
    """Change settings without effect, with which transformers does not save a generation config, with one warning."""
    unused, before = _without_effect(found), found.to_dict()
    if found.do_sample is None and found.temperature != 0 and not {*_OF_SAMPLING}.isdisjoint(unused):
        found.do_sample = True
        unused = _without_effect(found)
    for key in unused:
        setattr(found, key, None)
    changes = [
        f"{key}: {json.dumps(value)}"
        for key, value in found.to_dict().items()
        if value != before.get(key) and before.get(key) is not False
    ]
    if changes:
        warn(f"The {GENERATION_CONFIG} of {name} has settings without effect. It is saved with {', '.join(changes)}.")


def _without_effect(found: GenerationConfig) -> list[str]:
    """The settings without effect, by the list in the error of transformers."""
    try:
        found.validate(strict=True)
    except ValueError as error:
        return re.findall(r"^- `(\w+)`: ", str(error), re.MULTILINE)
    return []


def load_model_config(config: ModelSettings) -> Any:
    """The transformers configuration of `base_model_config` or `base_model`, without loading weights."""
    key = "base_model_config" if config.base_model_config else "base_model"
    name = find_model(config.base_model_config, key) if config.base_model_config else find_base_model(config)
    with doing(f"reading the configuration of {key}: {shortened(name)}"):
        found = pretrained_config(name, revision=config.revision_of_model, trust_remote_code=config.trust_remote_code)
    text = found.get_text_config()
    overrides = config.overrides_of_model_config.model_dump(exclude_none=True)
    for name, value in overrides.items():
        if not hasattr(text, name):
            raise ModelError(f"overrides_of_model_config.{name}: a {found.model_type} model has no such setting.")
        setattr(text, name, value)
    return found


def check_sequence_len(sequence_len: int, model_config: Any, name: str, longest: int | None) -> None:
    """Raise ConfigError if a document is longer than the model's number of positions. `longest` is the number of tokens
    of the longest one; None if it is not known, so that it may be `sequence_len`."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)  # absent: no limit
    if limit is None or sequence_len <= limit or (longest is not None and longest <= limit):
        return
    found = "as many tokens may be in one document" if longest is None else f"the longest text has {longest:,} tokens"
    raise ConfigError(f"sequence_len: {sequence_len} exceeds the {limit} positions of {name}, and {found}.")


def _warn_of_untrained_tokens(
    config: ModelSettings, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, size: int
) -> None:
    """Warn if the adapter leaves the rows of added tokens frozen; `size` is the vocabulary of the base model."""
    special = config.special_tokens.additional_special_tokens or []
    added = [*(config.tokens or []), *(token for token in special if tokenizer.convert_tokens_to_ids(token) >= size)]
    causal_lm = unwrap_adapter(model)
    both = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    layers = [layer for layer in both if layer is not None]
    names = {id(module): name.rpartition(".")[2] for name, module in causal_lm.named_modules()}
    frozen = [names[id(layer)] for layer in layers if not any(own.requires_grad for own in layer.parameters())]
    if added and frozen:
        warn(
            f"{'tokens' if config.tokens else 'special_tokens.additional_special_tokens'}: the adapter does not train "
            f"{' and '.join(frozen)}, so the rows of new tokens such as {added[0]} keep their initial values. Set "
            f"lora_modules_to_save: [{', '.join(names[id(layer)] for layer in layers)}]."
        )


def _warn_of_tokens_without_embedding(config: ModelSettings, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    """Warn of tokens that the tokenizer has, but not the model, and that the config does not add."""
    special = config.special_tokens.model_dump(exclude_none=True).values()
    named = [token for value in special for token in (value if isinstance(value, list) else [value])]
    given = {*named, *(config.tokens or []), *(config.added_tokens_overrides or {}).values()}
    new = [token for token, index in tokenizer.get_vocab().items() if index >= size and token not in given]
    if new:
        shown = f"{', '.join(map(repr, sorted(new)[:3]))}{', ...' if len(new) > 3 else ''}"
        warn(
            f"{'tokenizer_config' if config.tokenizer_config else 'base_model'}: the tokenizer has {len(tokenizer)} "
            f"tokens, but the model has embeddings of {size}. {len(new)} tokens ({shown}) get new embeddings, which "
            "are untrained. If this is the tokenizer of another model, use the model's own."
        )


def _fit_vocabulary(config: ModelSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    size, wanted = model.get_input_embeddings().num_embeddings, len(tokenizer)
    if config.resize_token_embeddings_to_32x:
        wanted = -(-wanted // 32) * 32
    if wanted > size or (config.shrink_embeddings and wanted < size):
        model.resize_token_embeddings(wanted, mean_resizing=config.mean_resizing_embeddings)
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


_IDLE = 0.9  # free part of the memory of a GPU that no program uses; drivers and displays take some
# What implementations require besides a CUDA device.
_PACKAGES = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
_PACKAGES |= {"flex_attention": lambda: True}


def usable_attention(wanted: str | None) -> str | None:
    """`wanted`, or None, transformers' choice for the model, with a warning if a GPU or a package is missing."""
    is_on_hub, has_cuda = wanted is not None and "/" in wanted, torch.cuda.is_available()
    available = (lambda: importlib.util.find_spec("kernels") is not None) if is_on_hub else _PACKAGES.get(wanted)
    if available is None or (has_cuda and available()):
        return wanted
    package = "the package kernels" if is_on_hub else "its package"
    lacking = f"{package} is not installed" if has_cuda else "no CUDA device is available"
    warn(f"attn_implementation: {wanted} cannot be used ({lacking}): the model's default is used.")
    return None


def spare_gpu(taken: int | None, needed: int) -> str | None:
    """Return a GPU other than number `taken` that is idle and has `needed` free bytes, such as cuda:1; None if none is.
    Idle GPUs have nearly all of their memory free, so a GPU of a vLLM server or of another run is not one. None if
    there are several training processes, since each has a GPU."""
    count = torch.cuda.device_count()
    if taken is None or count < 2 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return None
    memory = {index: torch.cuda.mem_get_info(index) for index in range(count) if index != taken}
    idle = {index: free for index, (free, total) in memory.items() if free >= _IDLE * total and free > needed}
    return f"cuda:{max(idle, key=idle.__getitem__)}" if idle else None


# Minimum fraction of 16-bit weights that a step should change. Below it, most updates are lost to rounding.
ENOUGH = 0.25


def weights_dtype(config: ModelSettings) -> torch.dtype:
    """The dtype set by `torch_dtype`, otherwise by `bf16`, otherwise float32. `bf16: auto` means bfloat16 if the GPU
    supports it. `fp16` is mixed precision: its weights stay float32, since float16 gradients cannot be unscaled."""
    if config.torch_dtype is not None:
        return getattr(torch, config.torch_dtype)
    has_bf16 = config.bf16 == "auto" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if config.bf16 is True or has_bf16 else torch.float32


@torch.no_grad()
def warn_of_lost_steps(model: nn.Module, learning_rate: float) -> None:
    """Warn if trained 16-bit weights are too coarse for updates of the size of the learning rate, as Adam's are. A
    weight w in bfloat16 has 8 significant bits: changes smaller than |w| / 512 are lost to rounding."""
    moved = total = 0
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16) and not weight.is_meta:
            some = weight.flatten()[: 2**16]  # a sample of each: enough for an estimate, and fast for any model
            moved += int((some.float() + learning_rate).to(some.dtype).ne(some).sum())
            total += some.numel()
    if moved < ENOUGH * total:
        warn(
            f"learning_rate: {learning_rate:g} is too small for 16-bit weights: an update of that size changes "
            f"{moved / total:.1%} of the weights, and others are rounded back to their old values. Set torch_dtype: "
            "float32, which preserves small updates, or adapter: lora, whose weights are float32."
        )


def _dequantised(config: ModelSettings, model_config: Any) -> Mxfp4Config | None:
    """Settings with which weights that are stored in MXFP4 are dequantised, since others cannot be trained."""
    found = getattr(model_config, "quantization_config", None)  # absent in most models
    if isinstance(found, dict) and found.get("quant_method") == "mxfp4":
        return Mxfp4Config(dequantize=True)
    if config.model_quantization_config is not None:
        warn(
            f"model_quantization_config: {config.model_quantization_config} has no effect: the weights of "
            f"{config.base_model} are not stored in MXFP4."
        )
    return None


def usable_quantisation(config: Settings) -> Settings:
    """`config`, without quantisation and with a warning on a machine without a GPU and without bitsandbytes."""
    has_package = importlib.util.find_spec("bitsandbytes") is not None
    if not _is_quantised(config) or has_package or torch.cuda.is_available():
        return config
    key = "load_in_4bit" if config.load_in_4bit else "load_in_8bit"
    dtype = str(weights_dtype(config)).removeprefix("torch.")
    warn(f"{key} has no effect: bitsandbytes is missing (pip install 'ebft[qlora]'). Weights are {dtype}.")
    return config.model_copy(update=_UNQUANTISED)


def as_trained(config: Settings, folder: Path) -> Settings:
    """`config`, without quantisation if the run that saved the adapter in `folder` could not quantise its weights."""
    record = keys_of_base(folder)
    is_dense = record.get("load_in_4bit") is False and record.get("load_in_8bit") is False
    return config.model_copy(update=_UNQUANTISED) if is_dense and _is_quantised(config) else config


_UNQUANTISED = {"load_in_4bit": False, "load_in_8bit": False, "adapter": "lora"}


def _is_quantised(config: ModelSettings) -> bool:
    return config.load_in_4bit or config.load_in_8bit


_MAMBA_2 = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")


def not_quantised(config: ModelSettings, model_config: PreTrainedConfig) -> list[str]:
    """Layers that stay in 16 bits: other code reads their numbers (fused kernels of Mamba 2, Gemma 3n, which clamps).

    In 8 bits, also those whose inputs have four dimensions, which bitsandbytes confuses (multi-head latent attention).
    """
    model_config = model_config.get_text_config()
    found = ["kv_b_proj"] if config.load_in_8bit and hasattr(model_config, "kv_lora_rank") else []
    found += ["prediction_coefs", "correction_coefs"] if model_config.model_type == "gemma3n_text" else []
    return [*found, *(["out_proj"] if model_config.model_type in _MAMBA_2 else [])]


def quantisation_config(config: ModelSettings, model_config: PreTrainedConfig) -> BitsAndBytesConfig | None:
    """Settings for 4-bit or 8-bit weights, or None without quantisation; see `usable_quantisation`."""
    if not _is_quantised(config := usable_quantisation(config)):
        return None
    given = config.bnb_config_kwargs
    left = not_quantised(config, model_config)
    return BitsAndBytesConfig(
        llm_int8_skip_modules=["lm_head", "score", *left] if left else None,
        load_in_4bit=config.load_in_4bit,
        load_in_8bit=config.load_in_8bit,
        llm_int8_threshold=given.llm_int8_threshold,
        bnb_4bit_quant_type=given.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=given.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=given.bnb_4bit_compute_dtype or weights_dtype(config),
        bnb_4bit_quant_storage=given.bnb_4bit_quant_storage,
    )
