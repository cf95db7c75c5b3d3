"""Checks of weight files: every tensor of the model must be in them, and no pickle is read."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ebft.errors import ModelError, cause
from ebft.models.classifier_files import refuse_classifier
from ebft.models.heads import LANGUAGE, Head, head_modules
from ebft.models.sharded_files import WEIGHTS as PARTS

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")
_SHOWN = 5  # names of tensors in messages


def load_complete(name: str, head: Head = LANGUAGE, *, may_lack_head: bool = False, **options: Any) -> PreTrainedModel:
    """The model `name`, with every tensor from its weight files; `options` are those of `from_pretrained`.

    With `may_lack_head`, weights without the head of a classifier are accepted: it starts from random values. Raises
    ModelError for other tensors that are missing or have another shape, and for weights that are pickles. Tensors that
    the model does not have give a warning, unless they are the head that is replaced.
    """
    if head is LANGUAGE:
        refuse_classifier(Path(name))
    if "gguf_file" not in options:
        refuse_pickles(Path(name))
        options["use_safetensors"] = True
    # Quantised tensors have other shapes until they are converted.
    reports = options.get("quantization_config") is None
    with _without_report():
        model, found = head.auto_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=reports, **options
        )
    own = tuple(f"{module}." for module in head_modules(model))
    _check_head_size(name, head, [given for key, given, _ in found["mismatched_keys"] if key.startswith(own)])
    starts_head = may_lack_head and any(key.startswith(own) for key in found["missing_keys"])
    if starts_head:
        inside = model.base_model_prefix + "."
        found["missing_keys"] = {key for key in found["missing_keys"] if not key.startswith(own)}
        found["unexpected_keys"] = {key for key in found["unexpected_keys"] if key.startswith(inside)}
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


def _check_head_size(name: str, head: Head, sizes: list[Any]) -> None:
    """Raise ModelError if the weights have a head of the right kind with another number of outputs."""
    if sizes:
        raise ModelError(
            f"{name} has a head with {sizes[0][0]} labels, but {head.num_labels} are needed. Use a model with "
            f"num_labels: {head.num_labels}, or one without a head"
        )


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
