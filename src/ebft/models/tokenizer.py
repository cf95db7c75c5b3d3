"""The base model's tokenizer, with the config's special tokens and chat template."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from ebft.errors import ModelError
from ebft.models.base import find_base_model
from ebft.models.chat_templates import apply_chat_template_choice
from ebft.models.pretrained import explained, find_model, pretrained_config, pretrained_tokenizer
from ebft.models.token_overrides import with_overrides
from ebft.paths import exists, json_object

if TYPE_CHECKING:
    from ebft.models.keys import ModelSettings


def load_tokenizer(config: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer of `tokenizer_config` or `base_model`, with a padding token.

    `added_tokens_overrides` replaces texts of added tokens. `special_tokens` that are not in the vocabulary are added
    to it (`load_model` resizes the embeddings). Without a padding token, the end-of-sequence token is used, with a
    warning. Raises ModelError if there is no tokenizer.
    """
    key = "tokenizer_config" if config.tokenizer_config else "base_model"
    name = find_model(config.tokenizer_config, key) if config.tokenizer_config else find_base_model(config)
    try:
        tokenizer = pretrained_tokenizer(
            name, revision=config.revision_of_model, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # the files may contain anything
        _check_config(config, name, key)
        path = Path(name) / "tokenizer.json"
        missing = [part for part in ("model", "added_tokens") if exists(path) and part not in json_object(path)]
        if missing:
            raise ModelError(
                f"{key}: {path} lacks {' and '.join(missing)}, so it is not that of a tokenizer. Copy or download it "
                "again."
            ) from error
        raise ModelError(f"{key}: cannot load a tokenizer from {name!r}: {explained(error)}") from error
    if config.added_tokens_overrides:
        tokenizer = with_overrides(tokenizer, config.added_tokens_overrides)
    special = config.special_tokens.model_dump(exclude_none=True)
    if special:
        tokenizer.add_special_tokens(special)
    if config.tokens:
        tokenizer.add_tokens(config.tokens)
    _ensure_pad_token(tokenizer)
    apply_chat_template_choice(tokenizer, config.chat_template)
    return tokenizer


def _check_config(config: ModelSettings, name: str, key: str) -> None:
    """Raise ModelError if config.json cannot be read, which transformers does to find the class of a tokenizer."""
    if not exists(Path(name) / "config.json"):
        return
    try:
        pretrained_config(name, trust_remote_code=config.trust_remote_code)
    except Exception as error:
        raise ModelError(f"{key}: {Path(name) / 'config.json'} cannot be used: {explained(error)}") from error


def _ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise ModelError(
            "The tokenizer has neither a padding token nor an end-of-sequence token. Set special_tokens.pad_token and "
            "special_tokens.eos_token."
        )
    tokenizer.pad_token = tokenizer.eos_token
    warnings.warn(
        f"The tokenizer has no padding token: the end-of-sequence token {tokenizer.eos_token!r} is used for padding. "
        "Set special_tokens.pad_token to use another one.",
        stacklevel=3,
    )
