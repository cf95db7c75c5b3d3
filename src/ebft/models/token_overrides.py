"""Other texts for tokens that a tokenizer reserves: `added_tokens_overrides`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.errors import ModelError, shortened

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
