"""Models in GGUF files: weights are dequantised on loading, and the result is an ordinary dense model."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ebft.errors import ModelError
from ebft.fetch.catalog import is_gguf, require_gguf
from ebft.models.weights import load_complete
from ebft.over_transformers import forget_title, read_gguf_metadata
from ebft.paths import exists

# Values of `tokenizer.ggml.pre` for GPT-2's pre-tokenisation, and for the same with individual digits.
_LIKE_GPT2 = {"gpt-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "phi-2", "roberta-bpe"}
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def check_gguf_file(folder: str, file: str) -> None:
    """Raise ModelError unless the folder `base_model` contains the file `gguf_file`."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(
            f"gguf_file: {file} must be in the folder base_model, but {folder!r} is not a folder on this machine. "
            f"Set base_model to the folder that contains {file}."
        )
    if not (path / file).is_file() or not is_gguf(file):
        found = ", ".join(_files_in(path)) or "no GGUF file"
        raise ModelError(
            f"gguf_file: {file} is not a GGUF file in {path}, which contains {found}. Correct gguf_file or base_model."
        )


def check_readable(name: str) -> None:
    """Raise ModelError if `name` is a GGUF file and the package to read it is missing, or a folder of GGUF files."""
    if is_gguf(name):
        require_gguf(name)
        return
    if not exists(Path(name)):
        return
    files = _files_in(Path(name))
    if files and not any((Path(name) / other).is_file() for other in ("config.json", "tokenizer.json")):
        raise ModelError(
            f"{name} contains {', '.join(files)} but no config.json, so it is a GGUF model. In a config, add "
            f"gguf_file: {files[0]}; elsewhere, give the path of the file: {Path(name) / files[0]}"
        )


def load_gguf_config(name: str, **options: Any) -> Any:
    """The transformers configuration in the GGUF file `name`."""
    with _undamaged(name):
        config = AutoConfig.from_pretrained(**_file(name), **options)
    forget_title(config)
    return config


def load_gguf_model(name: str, **options: Any) -> PreTrainedModel:
    """The dense model in the GGUF file `name`: exactly the file's weights, rounded to the `dtype` of `options`."""
    options.setdefault("config", load_gguf_config(name))
    # By default, transformers may keep the blocks quantised, which can be neither trained nor saved.
    dense = GgufConfig(dequantize=True)
    with _undamaged(name):
        file = _file(name)
        folder = file.pop("pretrained_model_name_or_path")
        model = load_complete(folder, **file, quantization_config=dense, **options)
    model.config.name_or_path = model.name_or_path = name
    # When saving an adapter, PEFT looks for a config.json of the base model to check whether the vocabulary grew.
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*\.gguf", category=UserWarning)
    return model


def load_gguf_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the GGUF file `name`, including its chat template.

    It has exactly the file's tokens, and splits text and adds a beginning-of-sequence token as the file specifies.
    """
    with _undamaged(name), TemporaryDirectory() as alone:
        # transformers prefers a tokenizer.json in the same folder, which may be of another model.
        link = Path(alone) / Path(name).name
        link.symlink_to(Path(name).absolute())
        loaded = AutoTokenizer.from_pretrained(**_file(str(link)))
        metadata, _ = read_gguf_metadata(name)
    backend = json.loads(loaded.backend_tokenizer.to_str())
    # transformers adds GPT-2's <|endoftext|> to every byte-level vocabulary, even if the model does not have it.
    count = metadata["tokenizer.ggml.tokens"]
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["id"] < count]
    backend["pre_tokenizer"] = _splitting(backend["pre_tokenizer"], metadata.get("tokenizer.ggml.pre"), name)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        chat_template=loaded.chat_template,
        **{key: token for key, token in loaded.special_tokens_map.items() if key.endswith("_token")},
        **({} if adds_bos is None else {"add_bos_token": adds_bos}),
    )


def _splitting(used: dict | None, kind: str | None, name: str) -> dict | None:
    """The pre-tokenizer with which the merges of the vocabulary were learned.

    If transformers does not know `kind`, it splits like GPT-2, which for some models gives different tokens around
    spaces and digits.
    """
    if used is None or used["type"] != "ByteLevel" or kind is None or kind in _LIKE_GPT2:
        return used
    if kind in _SINGLE_DIGITS:
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, used]}
    warnings.warn(
        f"{name} uses the pre-tokenizer {kind!r}, which is not supported: text is split like GPT-2, and some tokens "
        "may differ from those that the model was trained on. Set tokenizer_config to the model's original tokenizer "
        "to avoid this.",
        stacklevel=4,
    )
    return used


@contextmanager
def _undamaged(name: str) -> Iterator[None]:
    """Convert errors of reading past the end of the file, or an empty one, to ModelError."""
    try:
        yield
    except (struct.error, IndexError, KeyError, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith(("cannot reshape", "cannot mmap")):
            raise
        raise ModelError(f"{name} is truncated or corrupted ({error}). Download or convert it again.") from error


def _files_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.glob("*.gguf"))


def _file(name: str) -> dict[str, str]:
    """The arguments of `from_pretrained` for a GGUF file."""
    path = Path(name).absolute()
    # The absolute path, since a bare file name would first be looked up in the current folder.
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": str(path)}
