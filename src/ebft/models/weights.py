"""Checks of weight files: every tensor of the model must be in them, and no pickle is read."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from ebft.errors import ModelError, cause
from ebft.models.sharded_files import WEIGHTS as PARTS

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")
_SHOWN = 5  # names of tensors in messages


def load_complete(name: str, **options: Any) -> PreTrainedModel:
    """The causal LM `name`, with every tensor from its weight files; `options` are those of `from_pretrained`.

    Raises ModelError for tensors that are missing or have another shape, which would start from random values, and for
    weights that are pickles. Tensors that the model does not have give a warning.
    """
    if "gguf_file" not in options:
        refuse_pickles(Path(name))
        options["use_safetensors"] = True
    # Quantised tensors have other shapes until they are converted.
    reports = options.get("quantization_config") is None
    with _without_report():
        model, found = AutoModelForCausalLM.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=reports, **options
        )
    sizes = [
        f"{key} ({_shape(given)}, but the model has {_shape(own)})" for key, given, own in found["mismatched_keys"]
    ]
    if sizes:
        raise ModelError(
            f"the weights do not fit the configuration in config.json: {_some(sizes)}. Correct config.json, or use the "
            "weights that belong to it"
        )
    if found["missing_keys"]:
        unused = f" The weights have instead {_some(found['unexpected_keys'])}." if found["unexpected_keys"] else ""
        raise ModelError(
            f"the weights lack {_some(found['missing_keys'])}, which would start from random values.{unused} Use "
            "complete weights, or correct config.json"
        )
    if found["unexpected_keys"]:
        warnings.warn(
            f"{name}: the weights contain tensors that {type(model).__name__} with this config.json does not use: "
            f"{_some(found['unexpected_keys'])}.",
            stacklevel=4,
        )
    return model


def refuse_pickles(folder: Path) -> None:
    """Raise ModelError for a folder without safetensors whose weights are pickles, which can run code when loaded."""
    if (folder / PARTS).is_dir() and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} is a checkpoint that FSDP2 has saved in parts. Run `ebft merge-sharded {folder}`, and use the "
            "folder that it prints"
        )
    if not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return
    found = pickles(folder)
    if found:
        raise ModelError(
            f"{_some(found)} in {folder} may be a pickle, which can run code when it is loaded, so it is not read. If "
            "you trust its source, load it in Python with transformers or PEFT, and save it with "
            "save_pretrained(FOLDER), which writes safetensors"
        )


def pickles(folder: Path) -> list[str]:
    """The names of the files in a folder that may be weights in a pickle."""
    other = ("training_args.bin", "optimizer.pt", "scheduler.pt")
    found = (path.name for pattern in _PICKLES for path in folder.glob(pattern))
    return sorted(name for name in found if name not in other and not name.startswith("rng_state"))


def check_readable_tensors(file: Path) -> None:
    """Raise ModelError if a safetensors file is truncated or not in this format."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file} is truncated or not a safetensors file ({cause(error)}). Copy or download it again"
        ) from error


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN])}{more}"


def _shape(size: Iterable[int]) -> str:
    return " x ".join(map(str, size)) or "scalar"


@contextmanager
def _without_report() -> Iterator[None]:
    """Context manager without the table that transformers logs about missing tensors, which are reported here."""
    keep = lambda record: "LOAD REPORT" not in record.getMessage()
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
