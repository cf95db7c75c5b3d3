"""Loading by name: a folder, a GGUF file, a model of `ebft fetch`, or a Hub id, with the options of `from_pretrained`.

Used for the trainers' `model=`, the config's `base_model` and `ebft evaluate --model`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from peft import PeftType, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ebft.catalog import is_gguf, lasting_name, locate
from ebft.errors import ModelError, doing, shortened, warn
from ebft.models.causal_lm import LANGUAGE, HeadType, unwrap_adapter
from ebft.models.files import refuse_pointers
from ebft.models.weights import load_complete, load_gguf_config, load_gguf_model, load_gguf_tokenizer

GENERATION_CONFIG = "generation_config.json"


def find_model(name: str, key: str) -> str:
    """Absolute path or Hub id of the model `name`, the value of `key`."""
    with doing(f"looking for {key}: {shortened(name)}"):
        locate(name, "model", key)
    found = lasting_name(name)
    refuse_pointers(Path(found))
    return found


def pretrained_config(name: str, **options: Any) -> Any:
    """The transformers configuration of the model `name`, or of its text model if it is multimodal. `options` are
    passed to `from_pretrained`."""
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_config(name)
    return text_model_config(transformers.AutoConfig.from_pretrained(name, **options))


def text_model_config(found: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model of a multimodal one, if transformers has it as a causal LM; else `found`."""
    text = found.get_text_config()
    is_multimodal = text is not found and len(found.sub_configs) > 1 and not text.is_encoder_decoder
    # Multimodal models with these text models do not scale logits, but the text model alone does.
    scales = any(hasattr(text, name) for name in ("logit_scale", "logits_scaling"))
    if not is_multimodal or scales or type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return found
    text = copy.deepcopy(text)
    text.tie_word_embeddings = found.tie_word_embeddings
    text.name_or_path = found.name_or_path
    text.dtype = found.dtype if text.dtype is None else text.dtype
    if (quantised := getattr(found, "quantization_config", None)) is not None:  # absent in most models
        text.quantization_config = quantised
    return text


def pretrained_model(
    name: str, head: HeadType = LANGUAGE, *, may_lack_head: bool = False, **options: Any
) -> PreTrainedModel:
    """The model `name` with a head, which its weights may lack; `options` are passed to `from_pretrained`. Raises
    ModelError for incomplete or damaged weights."""
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_model(name, **options)
    if "config" not in options:
        known = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
        options["config"] = pretrained_config(name, **known)
    return load_complete(name, head, may_lack_head=may_lack_head, **options)


def pretrained_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name`; `options` are passed to `from_pretrained`."""
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_tokenizer(name)
    return transformers.AutoTokenizer.from_pretrained(name, **options)


_RATE = re.compile("drop|jitter")  # in names of attributes
# Routers that draw experts at random in training mode, and whose jitter is a threshold of the experts in both modes.
_SAMPLING_ROUTERS = {"PhimoeTopKRouter"}

# LoRA initialisations that move a part of the base weights into the adapter.
REWRITE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def load(model: Any, peft_config: Any = None, seed: int = 0, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The model, loaded if it is a name, with a new adapter (initialised with `seed`) if `peft_config` is given.
    `options` are passed to `from_pretrained` for a name."""
    if isinstance(model, str):
        with doing(f"loading the model {model}"):
            model = pretrained_model(find_model(model, "model"), **(options or {}))
    if peft_config is None:
        return model
    if hasattr(model, "disable_adapter"):
        raise ModelError("the model already has an adapter, so peft_config cannot add one")
    transformers.set_seed(seed)
    return get_peft_model(model, peft_config)


def disable_dropout(model: nn.Module) -> None:
    """Set the dropout rates and the router noise of the model to 0, with one warning if an adapter has dropout.
    `rates_as_loaded` restores them for a comparison."""
    lora_dropout, rates = 0.0, unwrap_adapter(model).__dict__.setdefault("rates_as_loaded", [])
    for name, module in model.named_modules():
        if type(module).__name__ in _SAMPLING_ROUTERS:
            module.register_forward_pre_hook(lambda router, _: setattr(router, "training", False))
            continue
        found = ["p"] if isinstance(module, nn.Dropout) else []
        # Models that call F.dropout, or add noise to their router, store the rate as a float on the module.
        found += [key for key, value in vars(module).items() if isinstance(value, float) and _RATE.search(key)]
        for attribute in found:
            rate = getattr(module, attribute)
            if rate:
                rates.append((module, attribute, rate))
                setattr(module, attribute, 0.0)
                lora_dropout = max(lora_dropout, rate if "lora_dropout" in name else 0.0)
    if lora_dropout > 0:
        warn(f"lora_dropout: {lora_dropout} is not applied, as rollouts are sampled without; see disable_dropout")


@contextmanager
def rates_as_loaded(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Context manager in which the model has the rates that `disable_dropout` set to 0. They have no effect in eval
    mode, unless a model uses a rate for something else."""
    rates = causal_lm.__dict__.get("rates_as_loaded", [])
    for module, attribute, value in rates:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, attribute, _ in rates:
            setattr(module, attribute, 0.0)


def check_adapter(model: nn.Module) -> None:
    """Raise ModelError for adapters that change the base model, or that are not part of the layers' forward pass."""
    if not hasattr(model, "disable_adapter"):
        return
    kind, problem = model.active_peft_config, None
    if kind.peft_type == PeftType.ADALORA:
        warn("AdaLoraConfig: the trainer does not call update_and_allocate, so all ranks stay at init_r")
    changed = getattr(kind, "init_lora_weights", True)
    own = (getattr(model.base_model, "prefix", ""), "modules_to_save", "trainable_tokens")
    stray = [n for n, p in model.named_parameters() if p.requires_grad and not any(mark in n for mark in own)]
    if kind.is_prompt_learning or kind.peft_type == PeftType.ADAPTION_PROMPT:
        problem = f"{type(kind).__name__} adds virtual tokens before the prompt, which is not supported"
    elif isinstance(changed, str) and changed.startswith(REWRITE_BASE):
        problem = f"init_lora_weights={changed!r} modifies the base weights, which the feature network has"
    elif stray:
        problem = (
            f"{len(stray)} parameters of the base model are trainable ({stray[0]}), so the feature network, which is "
            "the model with its adapter disabled, would not be frozen. Freeze them (LoraConfig(bias='none')), or list "
            "their modules in modules_to_save"
        )
    if problem:
        raise ModelError(problem)
