"""Location of a dataset or a base model: a local path, a model of `ebft fetch`, or a Hub id."""

import os
from glob import has_magic
from pathlib import Path
from typing import Literal

from ebft.catalog import MODELS, fetched_folder, nearest_model
from ebft.errors import DataError, EBFTError, ModelError, cause, shortened
from ebft.files import check_regular, exists

REACH_TIMEOUT = 5.0  # seconds; the Hub client alone retries for half a minute before it gives up


def locate(name: str, kind: Literal["dataset", "model"], key: str) -> Path | None:
    """The local path of `name`, or None if it is an existing Hub id.

    `key` is the config key with the value `name`, for messages. Raises DataError (kind `dataset`) or ModelError
    (kind `model`) if the path does not exist, the model is not fetched, or the Hub cannot be reached or does not know
    the id.
    """
    error = DataError if kind == "dataset" else ModelError
    path = _path(name)
    if exists(path):
        check_regular(path, error, f"{key}: {name}")
        if kind == "model" and name in MODELS:
            _check_shadowing(path, name, key)
        return path
    if kind == "model" and name in MODELS:
        folder = fetched_folder(name)
        if folder is None:
            raise ModelError(
                f"{key}: {name!r} is a model of `ebft fetch`, but it is not on this machine yet. Run "
                f"`ebft fetch {name}` first."
            )
        return folder
    if looks_local(name):
        raise error(
            f"{key}: the local path {shortened(name)!r} does not exist "
            f"(working directory: {Path.cwd()}). {_advice(name, kind)}"
        )
    _ask_hub(name, kind, key, error)
    return None


def lasting_name(name: str) -> str:
    """The name of the model `name` in saved adapters, model cards and servers.

    This is the absolute path of a local or fetched model, or a Hub id.
    """
    path = _path(name)
    if exists(path):
        return str(path.absolute())
    folder = fetched_folder(name)
    return name if folder is None else str(folder)


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # Path.expanduser raises an error for unknown users


def base_name(base_model: str, gguf_file: str | None) -> str:
    """The base model's absolute path or Hub id; the path of the GGUF file if there is one."""
    folder = lasting_name(base_model)
    return folder if gguf_file is None else str(Path(folder) / gguf_file)


def looks_local(name: str) -> bool:
    """Whether `name` can only be a path: a Hub id has at most one slash and no file extension."""
    if name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1:
        return True
    if has_magic(name) or "$" in name or name != name.strip():
        return True
    return Path(name).suffix.lower() in {".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gguf"}


def _advice(name: str, kind: str) -> str:
    """What to change in a path that does not exist."""
    if name != name.strip():
        return "It starts or ends with white space. Remove it."
    if "$" in name:
        return "Environment variables in a config are not replaced. Write the path itself."
    if kind == "dataset" and has_magic(name):
        folder, pattern = os.path.split(name)
        return f"For a pattern, name the folder and the pattern: `path: {folder or '.'}`, `data_files: {pattern!r}`."
    return "Correct the path, or use a Hub id such as owner/name."


def _check_shadowing(path: Path, name: str, key: str) -> None:
    """Raise ModelError if a folder that is no model takes precedence over a model of `ebft fetch`."""
    is_model = any((path / file).is_file() for file in ("config.json", "tokenizer.json")) or any(path.glob("*.gguf"))
    if not is_model:
        raise ModelError(
            f"{key}: the folder {path.absolute()} takes precedence over the model {name} of `ebft fetch`, but contains "
            "no model. Rename or remove the folder, or start the command in another one."
        )


def _ask_hub(name: str, kind: str, key: str, error: type[EBFTError]) -> None:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    assumed = f"{key}: {shortened(name)!r} is not a local path, so it was interpreted as a Hub id"
    near = nearest_model(name) if kind == "model" else None
    if near is not None:
        assumed += f" (`ebft fetch` provides {near})"
    if constants.HF_HUB_OFFLINE:
        return  # the library reads its cache, or immediately reports what is missing in it
    if kind == "model" and isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    api = HfApi()
    try:
        (api.dataset_info if kind == "dataset" else api.model_info)(name, timeout=REACH_TIMEOUT)
    except GatedRepoError as gated:
        raise error(f"{assumed}, but it is gated. Request access on the Hub, then run `hf auth login`.") from gated
    except (RepositoryNotFoundError, HFValidationError) as unknown:
        raise error(f"{assumed}, but there is no such {kind} on the Hub. Correct the id or the path.") from unknown
    except Exception as unreachable:  # the client's transport errors have no common public base class
        fetched = "" if near is None else f", {key}={near} after `ebft fetch {near}`"
        raise error(
            f"{assumed}, but the Hub cannot be reached ({cause(unreachable)}). Use a local path{fetched}, or set "
            "HF_HUB_OFFLINE=1 if the files are in the local cache."
        ) from unreachable
