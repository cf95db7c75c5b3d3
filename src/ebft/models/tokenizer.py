"""The base model's tokenizer, with the config's special tokens and chat template."""

import warnings
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ebft.data.locate import locate
from ebft.errors import ModelError
from ebft.models.chat_templates import apply_chat_template_choice


def load_tokenizer(config: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of `tokenizer_config` or `base_model`, with a padding token.

    `special_tokens` that the vocabulary lacks are added to it (`load_model` grows the embeddings). Without a
    padding token the end-of-sequence token pads, with a warning. Raises ModelError where there is no tokenizer.
    """
    key = "tokenizer_config" if config.tokenizer_config else "base_model"
    name = config.tokenizer_config or config.base_model
    locate(name, "model", key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=config.revision_of_model, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{key}: no tokenizer can be loaded from {name!r}: {error}") from error
    special = config.special_tokens.model_dump(exclude_none=True)
    if special:
        tokenizer.add_special_tokens(special)
    _ensure_pad_token(tokenizer)
    apply_chat_template_choice(tokenizer, config.chat_template)
    return tokenizer


def _ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise ModelError(
            "the tokenizer has neither a padding nor an end-of-sequence token. Set special_tokens.pad_token and "
            "special_tokens.eos_token."
        )
    tokenizer.pad_token = tokenizer.eos_token
    warnings.warn(
        f"The tokenizer has no padding token: the end-of-sequence token {tokenizer.eos_token!r} pads. Set "
        "special_tokens.pad_token to choose another.",
        stacklevel=3,
    )
