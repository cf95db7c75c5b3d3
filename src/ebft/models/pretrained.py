"""Loading by name: a folder, a GGUF file, a model of `ebft fetch`, or a Hub id, with the options of `from_pretrained`;
and the tokenizer of a run.

Used for the trainers' `model=`, the config's `base_model` and `ebft evaluate --model`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from jinja2 import Environment
from peft import PeftType, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ebft import catalog
from ebft.config.keys.models import ModelSettings
from ebft.data.rendering import rendered_examples, split_by_template, warn_of_split_markers
from ebft.errors import ModelError, doing, shortened, warn
from ebft.models.causal_lm import LANGUAGE, HeadType, unwrap_adapter
from ebft.models.weights import load_complete, load_gguf_config, load_gguf_model, load_gguf_tokenizer

GENERATION_CONFIG = "generation_config.json"


def find_model(name: str, key: str) -> str:
    """Absolute path or Hub id of the model `name`, the value of `key`."""
    with doing(f"looking for {key}: {shortened(name)}"):
        catalog.locate(name, "model", key)
    found = catalog.lasting_name(name)
    catalog.refuse_pointers(Path(found))
    return found


def pretrained_config(name: str, **options: Any) -> Any:
    """The transformers configuration of the model `name`, or of its text model if it is multimodal. `options` are
    passed to `from_pretrained`."""
    name = catalog.lasting_name(name)
    if catalog.is_gguf(name):
        return load_gguf_config(name)
    return text_model_config(transformers.AutoConfig.from_pretrained(name, **options))


# Types of causal LMs that transformers' AutoModelForCausalLM does not list.
_UNLISTED = {"mistral4": "Mistral4ForCausalLM"}


def text_model_config(found: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model of a multimodal one, if transformers has it as a causal LM; else `found`."""
    text = found.get_text_config()
    is_multimodal = text is not found and len(found.sub_configs) > 1 and not text.is_encoder_decoder
    if (name := _UNLISTED.get(text.model_type)) and type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        transformers.AutoModelForCausalLM.register(type(text), getattr(transformers, name), exist_ok=True)
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
    name = catalog.lasting_name(name)
    if catalog.is_gguf(name):
        return load_gguf_model(name, **options)
    if "config" not in options:
        known = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
        options["config"] = pretrained_config(name, **known)
    return load_complete(name, head, may_lack_head=may_lack_head, **options)


def pretrained_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name`; `options` are passed to `from_pretrained`."""
    name = catalog.lasting_name(name)
    if catalog.is_gguf(name):
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


def find_base_model(config: ModelSettings) -> str:
    """The base model's absolute path or Hub id. Raises ModelError if it is not found."""
    if config.gguf_file is not None:
        return find_model(catalog.base_name(config.base_model, config.gguf_file), "gguf_file")
    return find_model(config.base_model, "base_model")


def load_tokenizer(config: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer of `tokenizer_config` or `base_model`, with a padding token. `added_tokens_overrides` replaces
    texts of added tokens. `special_tokens` that are not in the vocabulary are added to it (`load_model` resizes the
    embeddings). Without a padding token, the end-of-sequence token is used, with a warning. Raises ModelError if there
    is no tokenizer."""
    key = "tokenizer_config" if config.tokenizer_config else "base_model"
    name = find_model(config.tokenizer_config, key) if config.tokenizer_config else find_base_model(config)
    with doing(f"loading the tokenizer of {key}: {shortened(name)}"):
        tokenizer = pretrained_tokenizer(
            name, revision=config.revision_of_model, trust_remote_code=config.trust_remote_code
        )
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # as transformers makes it without files
        raise ModelError(f"{key}: {name} has no tokenizer. Copy its files to the folder, or set tokenizer_config.")
    if config.added_tokens_overrides:
        tokenizer = with_overrides(tokenizer, config.added_tokens_overrides)
    special = config.special_tokens.model_dump(exclude_none=True)
    if special:
        tokenizer.add_special_tokens(special)
    if config.tokens:
        tokenizer.add_tokens(config.tokens)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ModelError("The tokenizer has no eos_token. Set pad_token and eos_token in special_tokens.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        warn(f"The tokenizer has no padding token: {tokenizer.eos_token!r} is used. See special_tokens.pad_token.")
    apply_chat_template_choice(tokenizer, config.chat_template)
    return tokenizer


def with_overrides(tokenizer: PreTrainedTokenizerBase, texts: dict[int, str]) -> PreTrainedTokenizerBase:
    """The tokenizer with other texts for some of its added tokens, by id; the vocabulary keeps its size. Raises
    ModelError for ids and texts that do not belong together afterwards, such as a text that is a token already."""
    with doing("reading added_tokens_overrides"), TemporaryDirectory(prefix="ebft-tokenizer-") as folder:
        old = {str(tokenizer.added_tokens_decoder[token]): text for token, text in texts.items()}
        tokenizer.save_pretrained(folder)
        _rewrite(Path(folder) / "tokenizer.json", lambda content: _in_tokenizer(content, texts, old))
        _rewrite(Path(folder) / "tokenizer_config.json", lambda content: _renamed(content, old))
        found = type(tokenizer).from_pretrained(folder)
    found.name_or_path = tokenizer.name_or_path
    wrong = [token for token, text in texts.items() if found.encode(text, add_special_tokens=False) != [token]]
    if wrong or len(found) != len(tokenizer):
        raise ModelError(
            f"added_tokens_overrides: {type(tokenizer).__name__} does not keep these texts for their ids: {texts}. "
            "Give each an id of an added token and a text that is not a token already."
        )
    return found


def _in_tokenizer(content: dict[str, Any], texts: dict[int, str], old: dict[str, str]) -> dict[str, Any]:
    for token in content["added_tokens"]:
        token["content"] = texts.get(token["id"], token["content"])
    vocabulary = content["model"].get("vocab")
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {old.get(text, text): number for text, number in vocabulary.items()}
    elif vocabulary is not None:  # of pairs of a text and its score
        content["model"]["vocab"] = [[old.get(text, text), score] for text, score in vocabulary]
    return content


def _renamed(value: Any, old: dict[str, str]) -> Any:
    """The value with other texts for the tokens, wherever the config of a tokenizer names them."""
    if isinstance(value, dict):
        return {name: _renamed(part, old) for name, part in value.items()}
    if isinstance(value, list):
        return [_renamed(part, old) for part in value]
    return old.get(value, value) if isinstance(value, str) else value


def _rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8"))), ensure_ascii=False), "utf-8")


# The statement that transformers adds to Jinja.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def apply_chat_template_choice(tokenizer: PreTrainedTokenizerBase, choice: str | None) -> None:
    """Set the tokenizer's chat template to `choice`: one of `TEMPLATES`, a file, or Jinja text. None and
    `tokenizer_default` keep the tokenizer's template; `tokenizer_default_fallback_NAME` uses the template NAME if there
    is none. Raises ModelError for any other value."""
    if choice is None:
        return
    own = tokenizer.chat_template
    if choice.startswith(catalog.FALLBACK):
        choice = choice.removeprefix(catalog.FALLBACK) if own is None else catalog.KEEP
    if choice in catalog.TEMPLATES and not (own is not None and catalog.has_own(choice)):
        template = catalog.named_template(choice)
        if own is not None and rendered_examples(tokenizer, own) == rendered_examples(tokenizer, template):
            return  # the same for chats; the tokenizer's may also support tools
        if own is not None:
            replaced = f"chat_template: {choice} replaces the template of the tokenizer, which has another"
            warn(f"{replaced}; {catalog.KEEP} keeps it.")
        _replace(tokenizer, choice, template)
    elif choice == catalog.KEEP or catalog.has_own(choice):
        if choice != catalog.KEEP and own is not None:  # without one, chats cannot be rendered
            warn(f"chat_template: {choice}: the template of the tokenizer is used.")
    else:
        with doing(f"using chat_template: {choice!r:.100}"):
            template = choice
            if not catalog.is_jinja(choice):
                path = Path(choice).expanduser()
                if not path.is_file():
                    raise ModelError(catalog.unknown_template(choice))
                template = path.read_text(encoding="utf-8")
            Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
            _replace(tokenizer, choice, template)


def _replace(tokenizer: PreTrainedTokenizerBase, choice: str, template: str) -> None:
    """Set a template, with a warning if the vocabulary lacks its markers; the tokenizer's own may be meant to."""
    if template == tokenizer.chat_template:
        return
    tokenizer.chat_template = template
    what = choice if choice in catalog.TEMPLATES else f"{choice!r:.60}"
    warn_of_split_markers(f"chat_template: {what}", split_by_template(tokenizer))
