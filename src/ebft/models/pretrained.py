"""Loading by name: a folder, a GGUF file, a model of `ebft fetch`, or a Hub id, with the options of `from_pretrained`.

Used for the trainers' `model=`, the config's `base_model` and `ebft evaluate --model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ebft.data.locate import lasting_name, locate
from ebft.errors import ModelError, cause
from ebft.fetch.catalog import is_gguf
from ebft.models.config_file import check_model_config, key_with
from ebft.models.gguf import check_readable, load_gguf_config, load_gguf_model, load_gguf_tokenizer
from ebft.models.heads import LANGUAGE, Head
from ebft.models.weights import load_complete
from ebft.paths import exists, json_object

GENERATION_CONFIG = "generation_config.json"
# Files that transformers reads without checking that they contain an object.
_SETTINGS = ("config.json", GENERATION_CONFIG, "tokenizer.json", "tokenizer_config.json")

_MOST_IDS = 2**24  # ids of a tokenizer; known vocabularies have up to 2**20


def find_model(name: str, key: str) -> str:
    """Absolute path or Hub id of the model `name`, the value of `key`. Raises ModelError if not found or unreadable."""
    locate(name, "model", key)
    found = lasting_name(name)
    check_readable(found)
    for file in _SETTINGS:
        _check_settings(Path(found) / file, key)
    return found


def _check_settings(path: Path, key: str) -> None:
    """Raise ModelError if a file that transformers reads is there but is not a JSON object."""
    if not exists(path):
        return
    try:
        values = json_object(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{key}: {path} cannot be read as JSON ({cause(error)}). Copy or download it again."
        ) from error
    if path.name == "config.json":
        check_model_config(values, path, key)
    if path.name == "tokenizer.json":
        _check_ids(values, path, key)
    longest = values.get("model_max_length", 0) if path.name == "tokenizer_config.json" else 0
    if isinstance(longest, bool) or not isinstance(longest, int | float | None):
        raise ModelError(
            f"{key}: {path}: model_max_length: invalid value {longest!r:.60}; expected a number of tokens."
        )


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
    """The transformers configuration of the model `name`; `options` are those of `from_pretrained`."""
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_config(name)
    return AutoConfig.from_pretrained(name, **options)


def pretrained_model(
    name: str, head: Head = LANGUAGE, *, may_lack_head: bool = False, **options: Any
) -> PreTrainedModel:
    """The model `name` with a head, which its weights may lack; `options` are those of `from_pretrained`.

    Raises ModelError for incomplete or damaged weights.
    """
    name = lasting_name(name)
    if is_gguf(name):
        return load_gguf_model(name, **options)
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
