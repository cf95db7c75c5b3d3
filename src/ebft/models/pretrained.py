"""Loading by name: a folder, a GGUF file, a model of `ebft fetch`, or a Hub id, with the options of `from_pretrained`.

Used for the trainers' `model=`, the config's `base_model` and `ebft evaluate --model`.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftType, get_peft_model
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from ebft.catalog import is_gguf, lasting_name, locate
from ebft.errors import ModelError, cause
from ebft.files import exists
from ebft.models.causal_lm import LANGUAGE, HeadType, unwrap_adapter
from ebft.models.files import key_with, read_object, refuse_pointers, refuse_values, wrong_values
from ebft.models.weight_files import other_content
from ebft.models.weights import (
    check_readable,
    load_complete,
    load_gguf_config,
    load_gguf_model,
    load_gguf_tokenizer,
)
from ebft.transformers_internals import QuantizationMethod

GENERATION_CONFIG = "generation_config.json"
# Files that transformers reads without checking that they contain an object.
_SETTINGS = ("config.json", GENERATION_CONFIG, "tokenizer.json", "tokenizer_config.json")

_MOST_IDS = 2**24  # ids of a tokenizer; known vocabularies have up to 2**20


def find_model(name: str, key: str) -> str:
    """Absolute path or Hub id of the model `name`, the value of `key`. Raises ModelError if not found or unreadable."""
    locate(name, "model", key)
    found = lasting_name(name)
    check_readable(found)
    if Path(found).is_file() and not is_gguf(found):
        raise ModelError(f"{key}: {found} is a file. Set {key} to the folder of a model, or to its name on the Hub.")
    if Path(found).is_dir() and key.startswith("base_model") and not Path(found, "config.json").exists():
        raise ModelError(f"{key}: {found} is not the folder of a model: it has no config.json.")
    refuse_pointers(Path(found))
    for file in _SETTINGS:
        _check_settings(Path(found) / file, key)
    return found


def _check_settings(path: Path, key: str) -> None:
    """Raise ModelError if a file that transformers reads is there but is not a JSON object."""
    if not exists(path):
        return
    values = read_object(path, "Copy or download it again.", key)
    if path.name == "config.json":
        refuse_values(f"{key}: {path}", wrong_values(values))
    if path.name == "tokenizer.json":
        _check_ids(values, path, key)
    longest = values.get("model_max_length") if path.name == "tokenizer_config.json" else None
    if isinstance(longest, bool) or not isinstance(longest, int | float | None):
        refuse_values(f"{key}: {path}", [("model_max_length", longest, "a number of tokens")])


def _check_ids(tokenizer: dict[str, Any], path: Path, key: str) -> None:
    """Raise ModelError for an id that no vocabulary has: the tokenizers library counts to it, or aborts."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            ids.setdefault(str(token.get("content")), token.get("id"))
    for text, number in ids.items():
        if type(number) is int and not 0 <= number < _MOST_IDS:
            raise ModelError(
                f"{key}: {path} gives the token {text!r:.60} the id {number}; ids of its {len(ids):,} tokens must be "
                f"between 0 and {_MOST_IDS - 1:,}. Correct the id, or copy or download the file again."
            )


def pretrained_config(name: str, **options: Any) -> Any:
    """The transformers configuration of the model `name`, of a multimodal one that of its text model if possible.

    `options` are those of `from_pretrained`.
    """
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_config(name)
    return text_model_config(AutoConfig.from_pretrained(name, **options))


def text_model_config(found: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model of a multimodal one, if transformers has it as a causal LM; else `found`."""
    text = found.get_text_config()
    is_multimodal = text is not found and len(found.sub_configs) > 1 and not text.is_encoder_decoder
    # Multimodal models with these text models do not scale logits, but the text model alone does.
    scales = any(hasattr(text, name) for name in ("logit_scale", "logits_scaling"))
    if not is_multimodal or scales or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
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
    """The model `name` with a head, which its weights may lack; `options` are those of `from_pretrained`.

    Raises ModelError for incomplete or damaged weights.
    """
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_model(name, **options)
    if "config" not in options:
        known = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
        options["config"] = pretrained_config(name, **known)
    return load_complete(name, head, may_lack_head=may_lack_head, **options)


def pretrained_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name`; `options` are those of `from_pretrained`."""
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_tokenizer(name)
    return AutoTokenizer.from_pretrained(name, **options)


def explained(error: Exception, settings: Mapping[str, Any] | None = None) -> str:
    """The message of an error of transformers; says how to allow code of the model's repository if it is needed.

    With the content of config.json as `settings`, the key of a name that transformers does not know is given.
    """
    if isinstance(error, ModelError):
        return str(error)
    if (other := other_content(error)) is not None:  # of a model on the Hub
        return f"a file of its weights {other}"
    if "trust_remote_code" in str(error):
        return (
            "it needs Python code from its repository, which is not run by default. If you have read the code and "
            "trust it, set trust_remote_code: true"
        )
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        name = key_with(error.args[0], settings or {})
        if name is not None:
            return f"config.json: {name}: transformers does not know {error.args[0]!r:.60}. Correct it"
    return cause(error)


_RATE = re.compile("drop|jitter")  # in names of attributes
# Routers that draw experts at random in training mode, and whose jitter is a threshold of the experts in both modes.
_SAMPLING_ROUTERS = {"PhimoeTopKRouter"}

# LoRA initialisations that move a part of the base weights into the adapter.
REWRITE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def load(model: Any, peft_config: Any = None, seed: int = 0, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The model, loaded if it is a name, with a new adapter (initialised with `seed`) if `peft_config` is given.

    `options` are those of `from_pretrained` for a name.
    """
    if isinstance(model, str):
        model = pretrained_model(find_model(model, "model"), **(options or {}))
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a causal language model or the name of one, got {model!r}")
    _check_weights(unwrap_adapter(model))
    if peft_config is None:
        return model
    if hasattr(model, "disable_adapter"):
        raise ModelError(
            "the model already has an adapter: use peft_config with a model without adapter, or leave it out"
        )
    set_seed(seed)
    return get_peft_model(model, peft_config)


def _check_weights(causal_lm: nn.Module) -> None:
    """Raise ModelError for a GGUF model as loaded by default, which can be neither trained nor saved.

    And for experts in float64, whose grouped products PyTorch does not compute.
    """
    if getattr(causal_lm, "quantization_method", None) == QuantizationMethod.GGUF:  # set by transformers alone
        raise ModelError(
            "model was loaded from a GGUF file as quantised weights, which cannot be trained. Load it with "
            "from_pretrained(folder, gguf_file=..., quantization_config=GgufConfig(dequantize=True)), or pass the path "
            "of the file as model"
        )
    is_grouped = isinstance(causal_lm, PreTrainedModel) and (
        "grouped_mm" in causal_lm.get_experts_implementation().values()
    )
    if is_grouped and any(each.dim() == 3 and each.dtype == torch.float64 for each in causal_lm.parameters()):
        raise ModelError(
            "the experts of the model are float64, but PyTorch computes grouped products of experts in float32, "
            "bfloat16 and float16 only. Call model.set_experts_implementation('eager'), or model.to(torch.float32)"
        )


def disable_dropout(model: nn.Module) -> None:
    """Set the dropout rates and the router noise of the model to 0, with one warning if an adapter has dropout.

    `rates_as_loaded` restores them for a comparison.
    """
    lora_dropout, rates = 0.0, unwrap_adapter(model).__dict__.setdefault("rates_as_loaded", [])
    for name, module in model.named_modules():
        if type(module).__name__ in _SAMPLING_ROUTERS:
            module.register_forward_pre_hook(_in_eval_mode)
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
        warnings.warn(
            f"lora_dropout: {lora_dropout} is not applied: rollouts are sampled without dropout, so the training "
            "forward pass does not use it either. Set disable_dropout: false to train with dropout",
            stacklevel=4,
        )


def _in_eval_mode(router: nn.Module, args: Any) -> None:
    router.training = False


@contextmanager
def rates_as_loaded(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Context manager in which the model has the rates that `disable_dropout` set to 0.

    They have no effect in eval mode, unless a model uses one of them for something else.
    """
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
    kind = model.active_peft_config
    if kind.is_prompt_learning or kind.peft_type == PeftType.ADAPTION_PROMPT:
        raise ModelError(
            f"{type(kind).__name__} adds virtual tokens before the prompt, which EBFT does not support. "
            "Use an adapter of the layers, such as LoraConfig"
        )
    if kind.peft_type == PeftType.ADALORA:
        warnings.warn(
            "AdaLoraConfig: the trainer does not call update_and_allocate, so all ranks stay at init_r, and the loss "
            "has no term for orthogonality. Use LoraConfig if no callback of yours calls it",
            stacklevel=4,
        )
    changed = getattr(kind, "init_lora_weights", True)
    if isinstance(changed, str) and changed.startswith(REWRITE_BASE):
        raise ModelError(
            f"init_lora_weights={changed!r} modifies the base weights, so the model with its adapter disabled is not "
            "the base model, which must be the feature network. Use the default initialisation"
        )
    own = (model.base_model.prefix, "modules_to_save", "trainable_tokens")
    stray = [n for n, p in model.named_parameters() if p.requires_grad and not any(mark in n for mark in own)]
    if stray:
        raise ModelError(
            f"{len(stray)} parameters of the base model are trainable in addition to the adapter (the first is "
            f"{stray[0]}), so the feature network, which is the model with its adapter disabled, would not be frozen. "
            "Freeze them (LoraConfig(bias='none')), list their modules in modules_to_save, or train without an adapter"
        )
