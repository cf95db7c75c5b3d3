"""The base model's tokenizer, with the config's special tokens and chat template."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from ebft.data.rendering import rendered_examples, split_by_template, warn_of_split_markers
from ebft.errors import ModelError, shortened
from ebft.files import exists, json_object
from ebft.models.load import find_base_model
from ebft.models.pretrained import explained, find_model, pretrained_config, pretrained_tokenizer

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
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # as transformers makes it without files
        raise ModelError(f"{key}: {name} has no tokenizer. Copy its files to the folder, or set tokenizer_config.")
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


_KEY = "added_tokens_overrides"


def with_overrides(tokenizer: PreTrainedTokenizerBase, texts: dict[int, str]) -> PreTrainedTokenizerBase:
    """The tokenizer with other texts for some of its added tokens, by id; the vocabulary keeps its size.

    Raises ModelError for an id that is not that of an added token or that is the start, end, padding or unknown token,
    for a text that is a token already, and for tokenizers without a `tokenizer.json`.
    """
    _check(tokenizer, texts)
    old = {str(tokenizer.added_tokens_decoder[token]): text for token, text in texts.items()}
    with TemporaryDirectory(prefix="ebft-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        _rewrite(Path(folder) / "tokenizer.json", lambda content: _in_tokenizer(content, texts, old))
        _rewrite(Path(folder) / "tokenizer_config.json", lambda content: _renamed(content, old))
        found = type(tokenizer).from_pretrained(folder)
    found.name_or_path = tokenizer.name_or_path
    wrong = {token: text for token, text in texts.items() if found.encode(text, add_special_tokens=False) != [token]}
    if wrong or len(found) != len(tokenizer):
        raise ModelError(
            f"{_KEY}: {type(tokenizer).__name__} does not keep other texts for {_list(wrong)}. Remove them."
        )
    return found


def _check(tokenizer: PreTrainedTokenizerBase, texts: dict[int, str]) -> None:
    if not tokenizer.is_fast:
        raise ModelError(f"{_KEY} needs a tokenizer with a tokenizer.json, not {type(tokenizer).__name__}. Remove it.")
    added = tokenizer.added_tokens_decoder
    unknown = [token for token in texts if token not in added]
    if unknown:
        known = shortened(", ".join(f"{token} ({text})" for token, text in sorted(added.items(), reverse=True)))
        raise ModelError(f"{_KEY}: {_list(unknown)}: not the id of an added token. The added tokens are {known}.")
    twice = {text for text in texts.values() if list(texts.values()).count(text) > 1}
    if twice:
        raise ModelError(f"{_KEY}: {_list(sorted(twice))}: the text of more than one token. Keep one of them.")
    named = {value: name for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    for token, text in texts.items():
        if (name := named.get(str(added[token]))) is not None:
            raise ModelError(f"{_KEY}: {token} is the {name} of the tokenizer. Use an id that is not in use.")
        if tokenizer.get_vocab().get(text, token) != token:
            raise ModelError(f"{_KEY}: {text!r} is the token {tokenizer.get_vocab()[text]} already. Remove it.")


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


def _list(values: Any) -> str:
    return ", ".join(str(value) for value in values) or "them"


_FOLDER = Path(__file__).parent / "templates"
_SAME_FORMAT = {"gemma3n": "gemma3", "phi_35": "phi_3"}
NAMES = tuple(sorted([*(path.stem for path in _FOLDER.glob("*.jinja")), *_SAME_FORMAT]))
KEEP, FALLBACK = "tokenizer_default", "tokenizer_default_fallback_"
# Names of templates in axolotl that the tokenizers of these models have themselves, and that are not in templates/.
_OF_MODELS = re.compile(
    "(aya|command_a(_rag|_tool_use)?|exaone4?|falcon_h1|gemma4|jamba|llama3_2_vision|magistral|pixtral|qwen2_vl|qwen3_5|"
    "smollm3)"
)
# The statement that transformers adds to Jinja.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def named_template(name: str) -> str:
    """Return the template in templates/ with one of `NAMES`."""
    return (_FOLDER / f"{_SAME_FORMAT.get(name, name)}.jinja").read_text(encoding="utf-8")


def apply_chat_template_choice(tokenizer: PreTrainedTokenizerBase, choice: str | None) -> None:
    """Set the tokenizer's chat template to `choice`: one of `NAMES`, a file, or Jinja text.

    None keeps the tokenizer's template, and so does `tokenizer_default`, which requires that there is one;
    `tokenizer_default_fallback_NAME` uses the template NAME if there is none. Raises ModelError for any other value.
    """
    if choice is None:
        return
    own = tokenizer.chat_template
    if choice.startswith(FALLBACK):
        name = choice.removeprefix(FALLBACK)
        if name not in NAMES:
            raise ModelError(f"chat_template: {FALLBACK}NAME needs one of the names {', '.join(NAMES)}, got {name!r}.")
        choice = name if own is None else KEEP
    if choice in NAMES:
        _use_named(tokenizer, choice)
    elif choice == KEEP and own is None:
        raise ModelError(
            f"chat_template: {KEEP} is set, but the tokenizer has no chat template. Use one of {', '.join(NAMES)}, "
            f"{FALLBACK}NAME, or a file."
        )
    elif _OF_MODELS.fullmatch(choice):
        if own is None:
            raise ModelError(
                f"chat_template: {choice} is the template of a chat model's tokenizer, but this tokenizer has none. "
                f"Use the tokenizer of such a model (tokenizer_config), one of {', '.join(NAMES)}, or a file."
            )
        warnings.warn(f"chat_template: {choice}: the template of the tokenizer is used.", stacklevel=2)
    elif choice != KEEP:
        _use_custom(tokenizer, choice)


def _use_named(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set the template `name`, unless the tokenizer's own is the same for chats; it may also support tools."""
    template, own = named_template(name), tokenizer.chat_template
    if own is not None:
        if rendered_examples(tokenizer, own) == rendered_examples(tokenizer, template):
            return
        warnings.warn(
            f"chat_template: {name} replaces the template of the tokenizer, which has another format. Set "
            f"chat_template: {KEEP} to keep it.",
            stacklevel=3,
        )
    _replace(tokenizer, name, template)


def _replace(tokenizer: PreTrainedTokenizerBase, choice: str, template: str) -> None:
    """Set a template, with a warning if the vocabulary lacks its markers; the tokenizer's own may be meant to."""
    if template == tokenizer.chat_template:
        return
    tokenizer.chat_template = template
    what = choice if choice in NAMES else f"{choice!r:.60}"
    warn_of_split_markers(f"chat_template: {what}", split_by_template(tokenizer))


def _use_custom(tokenizer: PreTrainedTokenizerBase, choice: str) -> None:
    template = _custom(choice)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ModelError(
            f"chat_template: {choice!r:.100} is not a Jinja template: {error.message} (line {error.lineno})."
        ) from error
    _replace(tokenizer, choice, template)


def _custom(choice: str) -> str:
    if "{{" in choice or "{%" in choice:
        return choice
    path = Path(choice).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"chat_template: {choice} cannot be read as UTF-8 text ({error}).") from error
    raise ModelError(
        f"chat_template: invalid value {choice!r}; expected a known name ({', '.join([*NAMES, KEEP])}, or "
        f"{FALLBACK}NAME), the path of a file, or Jinja text (chat_template_jinja)."
    )
