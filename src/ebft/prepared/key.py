"""The key of prepared rows: a hash of everything that determines them."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.config.schema import RunConfig
from ebft.data.file_hash import file_hash
from ebft.data.fingerprint import source_fingerprint
from ebft.prepared.code import own_code, transform_sources
from ebft.prepared.settings import row_settings

FORMAT = 1  # of the stored folder
# Entries of tokenizer_config.json about the place that the tokenizer was loaded from.
_PLACE = ("is_local", "local_files_only", "name_or_path")


def row_inputs(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Everything that determines the rows of a run, as JSON: settings, data, transforms, tokenizer, code.

    Raises DataError if a data source or a transform does not exist.
    """
    sources = transform_sources([entry.type for entry in (*config.datasets, *config.test_datasets)])
    inputs = {
        "format": FORMAT,
        "settings": row_settings(config, sources.values()),
        "data": data_fingerprints(config),
        "transforms": {name: _hash(source) for name, source in sorted(sources.items())},
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "code": own_code(),
    }
    return json.loads(json.dumps(inputs, default=str))


def data_fingerprints(config: RunConfig) -> list[dict[str, Any]]:
    """The fingerprint of each source of `datasets` and `test_datasets`."""
    return [source_fingerprint(entry) for entry in (*config.datasets, *config.test_datasets)]


def key_of(inputs: dict[str, Any]) -> str:
    """The key of rows with these inputs: 32 hexadecimal digits."""
    return _hash(json.dumps(inputs, sort_keys=True))[:32]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The hash of each file that saves the tokenizer, and of its chat template and its class."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        found = {path.relative_to(folder).as_posix(): _tokenizer_file(path) for path in paths}
    found["chat template"] = _hash(json.dumps(tokenizer.chat_template))
    source = inspect.getsourcefile(type(tokenizer))
    found["class"] = type(tokenizer).__name__ if source is None else file_hash(Path(source))
    return found


def _tokenizer_file(path: Path) -> str:
    if path.name != "tokenizer_config.json":
        return file_hash(path)
    values = json.loads(path.read_text(encoding="utf-8"))
    return _hash(json.dumps({name: value for name, value in values.items() if name not in _PLACE}, sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
