"""Loading of saved adapters, whose files must be complete and must fit the base model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, PeftType
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ebft.data.locate import lasting_name
from ebft.errors import ModelError, cause, shortened
from ebft.models.classifier_files import refuse_classifier
from ebft.models.heads import task_type
from ebft.models.resized import fit_to_adapter
from ebft.models.weights import read_header, refuse_pickles
from ebft.paths import json_object

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A warning of PEFT about the rank of fused experts, which it applies, but looks for among modules.
UNMATCHED_RANK = r"The following (rank|alpha)_pattern keys did not match any targeted module.*gate_up_proj"


def read_adapter_config(folder: Path) -> PeftConfig:
    """The settings of the adapter in `folder`. Raises ModelError if they cannot be read."""
    path = folder / SETTINGS
    try:
        values = json_object(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({cause(error)}). Save the adapter again.") from error
    if "peft_type" not in values:
        raise ModelError(f"{path} has no peft_type, so it is not the configuration of an adapter of PEFT.")
    _check_values(values, path)
    try:
        return PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # PEFT does not check the types of the values
        raise ModelError(f"{path} is not the configuration of an adapter: {cause(error)}.") from error


def _check_values(values: dict[str, Any], path: Path) -> None:
    """Raise ModelError for values that PEFT does not check."""
    kind = values["peft_type"]
    if not isinstance(kind, str) or kind not in PeftType.__members__:
        expected = ", ".join(PeftType.__members__)
        raise ModelError(f"{path}: peft_type: invalid value {kind!r:.60}; expected one of {expected}.")
    if kind != PeftType.LORA:
        return
    rank, alpha = values.get("r", 1), values.get("lora_alpha", 1)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ModelError(f"{path}: r: invalid value {rank!r:.60}; expected a positive integer.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{path}: lora_alpha: invalid value {alpha!r:.60}; expected a number.")


def check_tensors(path: Path) -> dict[str, Tensor]:
    """The names and shapes of the tensors of an adapter, on the meta device.

    Raises ModelError if the file is damaged, or a weight is an integer, NaN or infinite (training diverged).
    """
    stored = read_header(path)
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            tensor = file.get_tensor(name)
            if ".lora_" in name and not tensor.is_floating_point():
                kind = str(tensor.dtype).removeprefix("torch.")
                raise ModelError(
                    f"{path} has {name} as {kind}, but the weights of an adapter are floating-point numbers. Save the "
                    "adapter again"
                )
            if tensor.is_floating_point() and not tensor.float().isfinite().all():  # absent for float8
                raise ModelError(
                    f"{path} contains NaN or infinite values ({name}), so the model would generate random text. Use "
                    "an earlier checkpoint, or train again with a lower learning_rate"
                )
    return stored


def load_saved_adapter(model: PreTrainedModel, name: str, tokens: int | None = None, **options: Any) -> PeftModel:
    """`model` with the adapter in the folder `name`; `options` are those of `PeftModel.from_pretrained`.

    The embeddings are resized to those of the adapter, with a row for each of the `tokens` of the tokenizer; without
    the number, the embeddings of the model never shrink. Raises ModelError if files are damaged or pickles, or if the
    adapter does not fit the model in all its layers.
    """
    name = lasting_name(name)
    folder, stored = Path(name), {}
    if folder.is_dir():
        found = read_adapter_config(folder)
        if found.task_type != task_type(model):
            refuse_classifier(folder, f"its adapter does not fit a {type(model).__name__}")
        if options.get("is_trainable") and getattr(found, "trainable_token_indices", None):
            raise ModelError(
                f"{folder / SETTINGS}: adapters with trainable_token_indices cannot be trained further, since `ebft "
                "merge-lora` merges whole weights. Train a new one with lora_modules_to_save: [embed_tokens]"
            )
        refuse_pickles(folder)
        if not (folder / WEIGHTS).is_file():
            raise ModelError(f"{folder} has no {WEIGHTS}. Give the folder of a completely saved adapter.")
        stored = check_tensors(folder / WEIGHTS)
        fit_to_adapter(model, folder / WEIGHTS, tokens)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=UNMATCHED_RANK)
        try:
            loaded = PeftModel.from_pretrained(model, name, **options)
        except Exception as error:  # PEFT and PyTorch raise many types of errors
            raise ModelError(
                f"the adapter in {name!r} is incompatible with the base model: {cause(error)}. Its settings are in "
                f"{SETTINGS}."
            ) from error
    for warning in caught:
        message = str(warning.message)
        if "missing adapter keys" in message:
            raise ModelError(
                f"the adapter in {name!r} does not fit the base model or is incomplete: its weights lack tensors that "
                f"its {SETTINGS} describes ({shortened(message)})"
            )
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    _check_all_used(loaded, name, stored)
    return loaded


def _check_all_used(model: PeftModel, name: str, stored: Collection[str]) -> None:
    """Raise ModelError if tensors of the adapter belong to no part of the model, which PEFT does not report."""
    own = {key.replace(".modules_to_save.default", "").replace(".default", "") for key in model.state_dict()}
    # Of embeddings that were resized and trained fully, PEFT saves a second copy.
    own |= {key for key in stored if ".modules_to_save." in key and key.replace(".modules_to_save.", ".") in stored}
    if own.issuperset(stored):
        return
    # PEFT converts names of other releases. A second time, loading changes nothing, but returns the names.
    left = set(model.load_adapter(name, "default", is_trainable=not model.active_peft_config.inference_mode)[1])
    left = sorted(left - own)
    if left:
        shown = f"{', '.join(left[:3])}{f' and {len(left) - 3} more' if len(left) > 3 else ''}"
        raise ModelError(
            f"the adapter in {name!r} has tensors that belong to no part of the model: {shown}. It was "
            f"trained on another model, or its {SETTINGS} was changed. Use it with the model that it was trained on"
        )
