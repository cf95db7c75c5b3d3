"""The models to evaluate, and the one feature network that all of them are compared in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from torch import nn
from transformers import PreTrainedTokenizerBase

from ebft.data.locate import base_name, lasting_name
from ebft.errors import ConfigError, ModelError
from ebft.features import FeatureNetwork
from ebft.fetch.models import is_gguf
from ebft.models.base import check_sequence_len, load_base_model, load_model_config
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.pretrained import find_model, pretrained_tokenizer

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

ADAPTER_FILE = "adapter_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PROBE = "The quick brown fox jumps over 13 lazy dogs.\n\tdef f(x): return x ** 2  # émigré 東京"


@dataclass
class Subject:
    """A model under evaluation, in eval mode on its device, and the feature network of the config's base model."""

    policy: nn.Module
    network: FeatureNetwork


def own_models(config: RunConfig) -> list[str]:
    """What a config's run is about, where the user names no model: its base model, and what it has trained."""
    folder = Path(config.output_dir)
    trained = (folder / ADAPTER_FILE).is_file() or any(folder.glob("*.safetensors"))
    return [config.base_model, *([config.output_dir] if trained else [])]


def check_model(config: RunConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse, before anything is measured, a model that is not there, or whose tokens or positions do not fit.

    Raises ModelError, or ConfigError where `sequence_len` is beyond its positions.
    """
    if not _same_model(config, name):
        _check_tokenizer(find_model(name, "--model"), tokenizer)
    adapter = _adapter_of(name)
    if adapter is not None and (adapter.is_prompt_learning or adapter.peft_type == PeftType.ADAPTION_PROMPT):
        raise ModelError(
            f"--model {name}: {type(adapter).__name__} puts virtual tokens before the prompt, which blocks and "
            "features here do not have. Evaluate an adapter on the layers, such as LoRA, or a whole model."
        )
    if adapter is None and not _same_model(config, name):
        found = load_model_config(_of_base(config, name))
        check_sequence_len(config.sequence_len, found, name)
        size = found.get_text_config().vocab_size
        if size < len(tokenizer):
            raise ModelError(
                f"--model {name}: it knows {size} tokens, and the tokenizer of the config's base_model has "
                f"{len(tokenizer)}. Evaluate it with a config of its own base_model."
            )


def load_subject(config: RunConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> Subject:
    """The model `name`, a folder or a hub id of a whole model or an adapter, beside the feature network.

    The network is always the config's `base_model`, frozen. Where `name` is that model, or an adapter that leaves its
    weights as they are, the two share them. Raises ModelError where it cannot be loaded.
    """
    adapter = _adapter_of(name)
    if adapter is None:
        policy = load_base_model(_of_base(config, name), tokenizer)
    else:
        policy = _with_adapter(config, adapter, name, tokenizer)
    policy = placed(policy).eval().requires_grad_(False)
    ebft = config.ebft
    if _shares_base(config, name, adapter):
        network = FeatureNetwork(policy, ebft.feature_layers, ebft.embed_method, copy=False)
    else:
        frozen = placed(load_base_model(config, tokenizer), ebft.feature_device).eval().requires_grad_(False)
        network = FeatureNetwork(frozen, ebft.feature_layers, ebft.embed_method, copy=False)
    return Subject(policy, network)


def _shares_base(config: RunConfig, name: str, adapter: PeftConfig | None) -> bool:
    """Whether the policy without its adapter is the config's base model, weight by weight."""
    if adapter is None:
        return _same_model(config, name)
    if not isinstance(adapter, LoraConfig) or not _same_model(config, adapter.base_model_name_or_path):
        return False
    # Other initialisations move a part of the base's weights into the adapter; trained biases are the base's own.
    return adapter.bias == "none" and adapter.init_lora_weights in (True, False, "gaussian")


def _check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model saved with another tokenizer than the config's: its tokens would mean something else."""
    if not is_gguf(name) and not any((Path(name) / file).is_file() for file in _TOKENIZER_FILES):
        return  # a bare adapter, or a hub id
    own = pretrained_tokenizer(name)
    if own(_PROBE)["input_ids"] != tokenizer(_PROBE)["input_ids"]:
        raise ModelError(
            f"--model {name}: its tokenizer gives other tokens than that of the config's base_model, so the two cannot "
            "be compared on the same tokens. Evaluate it with a config of its own base_model."
        )


def placed(model: nn.Module, device: str | None = None) -> nn.Module:
    """The model on `device`, or on the accelerator where there is one; a model spread by a device map stays."""
    if getattr(unwrap_adapter(model), "hf_device_map", None) is not None:  # set by transformers alone
        return model
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device)


def _adapter_of(name: str) -> PeftConfig | None:
    """The configuration of an adapter; None where `name` is no adapter."""
    folder = Path(lasting_name(name))
    if folder.exists() and not (folder / ADAPTER_FILE).is_file():
        return None
    try:
        found = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        if not folder.is_dir():
            return None  # PEFT raises ValueError where a hub repository has no adapter
        raise ModelError(f"--model {name}: its {ADAPTER_FILE} cannot be read: {error}") from error
    if not found.base_model_name_or_path:
        raise ModelError(f"--model {name}: its {ADAPTER_FILE} does not say which base model it is of.")
    return found


def _with_adapter(config: RunConfig, adapter: PeftConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> PeftModel:
    base = adapter.base_model_name_or_path
    try:
        model = load_base_model(_of_base(config, base), tokenizer)
        return PeftModel.from_pretrained(model, lasting_name(name))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"an adapter on {base} that cannot be loaded: {error}") from error


def _of_base(config: RunConfig, name: str) -> Any:
    """The config with another base model; its weights' own configuration goes with it."""
    if _same_model(config, name):
        return config
    if config.load_in_4bit or config.load_in_8bit:
        raise ConfigError(
            f"--model {name} is no adapter on base_model, and load_in_4bit and load_in_8bit are for training adapters. "
            "Set them to false, so that all models are measured in one precision."
        )
    own = {"gguf_file": None, "base_model_config": None, "revision_of_model": None}
    return config.model_copy(update={"base_model": name, **own})


def _same_model(config: RunConfig, name: str) -> bool:
    """Whether `name` is the config's base model; its folder is, where `gguf_file` names a file in there."""
    return lasting_name(name) in (base_name(config), lasting_name(config.base_model))
