"""Loading of the models to evaluate, and of the feature network that all models share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftConfig, PeftType
from torch import nn
from transformers import PreTrainedTokenizerBase

from ebft.catalog import base_name, is_gguf, lasting_name
from ebft.errors import ConfigError, ModelError, prefixed, warn
from ebft.features import FeatureNetwork
from ebft.files import ADAPTER_CONFIG as ADAPTER_FILE
from ebft.models import causal_lm, load, pretrained, weight_files
from ebft.models.adapter import load_saved_adapter, read_adapter_config
from ebft.run.checkpoints import checkpoint_hint

if TYPE_CHECKING:
    from ebft.run.config.schema import RunConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PROBE = "The quick brown fox jumps over 13 lazy dogs.\n\tdef f(x): return x ** 2  # émigré 東京"


@dataclass
class Subject:
    """A model to evaluate, in eval mode on its device, and the feature network of the config's base model."""

    policy: nn.Module
    network: FeatureNetwork


def own_models(config: RunConfig) -> list[str]:
    """Return the default models to evaluate: the config's base model and, if it exists, its trained model. If
    output_dir has only checkpoints of a run that did not finish, a warning names the newest."""
    folder = Path(config.output_dir)
    trained = (folder / ADAPTER_FILE).is_file() or any(folder.glob("*.safetensors"))
    if not trained and (hint := checkpoint_hint(folder, f"--model {config.base_model} --model {{}}")):
        warn(f"output_dir: {folder} has no model, so only the base model is evaluated. {hint}")
    return [config.base_model, *([config.output_dir] if trained else [])]


def check_model(config: RunConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError, before the evaluation, if a model does not exist, or its tokenizer is not compatible."""
    if not _same_model(config, name):
        folder = Path(lasting_name(name))
        has_model = (folder / ADAPTER_FILE).is_file() or (folder / "config.json").is_file()
        if not has_model and (hint := checkpoint_hint(folder, "--model {}")):
            raise ModelError(f"--model {folder} contains no model. {hint}")
        with prefixed(f"--model {folder}"):
            weight_files.refuse_parts(folder)
        _check_tokenizer(pretrained.find_model(name, "--model"), tokenizer)
    adapter, base = _adapter_of(name)
    if adapter is not None and (adapter.is_prompt_learning or adapter.peft_type == PeftType.ADAPTION_PROMPT):
        raise ModelError(f"--model {name}: {type(adapter).__name__} adds virtual tokens, which is not supported.")
    if _same_model(config, base):
        return
    with prefixed(f"--model {name}", ModelError):
        size = load.load_model_config(_of_base(config, base)).get_text_config().vocab_size
    if base != name and _has_tokenizer(name):
        return  # the adapter was saved with a tokenizer, which was checked, and with the embeddings added for it
    _check_tokenizer(pretrained.find_model(base, "--model"), tokenizer)
    if size < len(tokenizer):
        raise ModelError(f"--model {name}: vocab_size is {size}, but the tokenizer of base_model has {len(tokenizer)}.")


def check_positions(config: RunConfig, names: list[str], longest: int | None) -> None:
    """Raise ConfigError if the longest document, of `longest` tokens, exceeds the positions of a model."""
    for name in (config.base_model, *names):
        base = name if _same_model(config, name) else _adapter_of(name)[1]
        load.check_sequence_len(config.sequence_len, load.load_model_config(_of_base(config, base)), base, longest)


def load_subject(config: RunConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> Subject:
    """Load the model `name`, a folder or hub id of a full model or an adapter, together with the feature network. The
    feature network is always the config's `base_model`, frozen. If `name` is that model, or an adapter that does not
    change its weights, both share the weights. Raises ModelError if the model cannot be loaded."""
    adapter, base = _adapter_of(name)
    if adapter is None:
        policy = load.load_base_model(_of_base(config, base), tokenizer)
    else:
        with prefixed(f"--model {name}, an adapter of {base}"):
            policy = load_saved_adapter(load.load_base_model(_of_base(config, base), tokenizer), name, len(tokenizer))
    frozen = policy = placed(policy).eval().requires_grad_(False)
    ebft = config.ebft
    if not (keeps_base(adapter) and _same_model(config, base)):
        frozen = placed(load.load_base_model(config, tokenizer), ebft.feature_device).eval().requires_grad_(False)
    return Subject(policy, FeatureNetwork(frozen, ebft.feature_layers, ebft.embed_method, copy=False))


def keeps_base(adapter: PeftConfig | None) -> bool:
    """Whether a model with this adapter switched off is exactly its base model; None: without an adapter, it is."""
    if adapter is None:
        return True
    # Other initialisations move a part of the base weights into the adapter; trained biases are part of the base model.
    is_lora = isinstance(adapter, LoraConfig)
    return is_lora and adapter.bias == "none" and adapter.init_lora_weights in (True, False, "gaussian")


def _check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if the model was saved with another tokenizer than the config's base model."""
    if not is_gguf(name) and not _has_tokenizer(name):
        return  # an adapter without tokenizer files, or a hub id
    own = pretrained.pretrained_tokenizer(name)
    if own(_PROBE)["input_ids"] != tokenizer(_PROBE)["input_ids"]:
        raise ModelError(f"--model {name}: its tokenizer differs from the tokenizer of base_model. Evaluate it apart.")


def _has_tokenizer(name: str) -> bool:
    return any((Path(name) / file).is_file() for file in _TOKENIZER_FILES)


def placed(model: nn.Module, device: str | None = None) -> nn.Module:
    """Move the model to `device`, or else to the accelerator if available; a model with a device map is not moved."""
    if getattr(causal_lm.unwrap_adapter(model), "hf_device_map", None) is not None:  # set by transformers
        return model
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device)


def _adapter_of(name: str) -> tuple[PeftConfig | None, str]:
    """The configuration of an adapter and the name of its base model; None and `name` if it is not an adapter."""
    folder = Path(lasting_name(name))
    if folder.exists() and not (folder / ADAPTER_FILE).is_file():
        return None, name
    if folder.is_dir():
        with prefixed(f"--model {name}"):
            found = read_adapter_config(folder)
    else:
        try:
            found = PeftConfig.from_pretrained(str(folder))
        except (ValueError, TypeError, KeyError):
            return None, name  # PEFT raises ValueError if a hub repository has no adapter
    return found, found.base_model_name_or_path


def _of_base(config: RunConfig, name: str) -> Any:
    """Return the config with another base model, without the options that configure the original base model."""
    if _same_model(config, name):
        return config
    if config.load_in_4bit or config.load_in_8bit:
        raise ConfigError(
            f"--model {name} is not an adapter on base_model, but load_in_4bit and load_in_8bit are supported for "
            "adapters only. Set them to false, so that all models are evaluated in the same precision."
        )
    own = {"gguf_file": None, "base_model_config": None, "revision_of_model": None}
    return config.model_copy(update={"base_model": name, **own})


def _same_model(config: RunConfig, name: str) -> bool:
    """Whether `name` is the config's base model, or its folder if `gguf_file` selects a file in that folder."""
    return lasting_name(name) in (base_name(config.base_model, config.gguf_file), lasting_name(config.base_model))
