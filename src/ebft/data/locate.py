"""Where a dataset or a base model lives: a path on this machine, a model of `ebft fetch`, or an id on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ebft.errors import DataError, EBFTError, ModelError
from ebft.fetch.models import MODELS, fetched_folder, nearest_model

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

REACH_TIMEOUT = 5.0  # seconds; the hub client alone retries for half a minute before it gives up


def locate(name: str, kind: Literal["dataset", "model"], key: str) -> Path | None:
    """The local path that `name` means, or None when it is a hub id and the hub has it.

    `key` is the config key that held `name`, for messages. Raises DataError (kind `dataset`) or ModelError
    (kind `model`) when the path does not exist, the model is not fetched, or the hub cannot be reached or does not
    know the id.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if kind == "model" and name in MODELS:
        return _fetched(name, key)
    error = DataError if kind == "dataset" else ModelError
    if looks_local(name):
        raise error(
            f"{key}: {name!r} was taken as a local path and there is no such file or folder "
            f"(looked from {Path.cwd()}). Correct the path, or give a hub id such as owner/name."
        )
    _ask_hub(name, kind, key, error)
    return None


def lasting_name(name: str) -> str:
    """The model `name` as saved adapters, cards and servers name it.

    That is a local path or a fetched model by its absolute path, a hub id as it is.
    """
    path = Path(name).expanduser()
    if path.exists():
        return str(path.absolute())
    folder = fetched_folder(name)
    return name if folder is None else str(folder)


def base_name(config: RunConfig) -> str:
    """The base model of `config` by its lasting name: the path of the GGUF file where `gguf_file` names one."""
    folder = lasting_name(config.base_model)
    return folder if config.gguf_file is None else str(Path(folder) / config.gguf_file)


def looks_local(name: str) -> bool:
    """Whether `name` can only be a path: a hub id has at most one slash and no file ending."""
    if name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1:
        return True
    return Path(name).suffix.lower() in {".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gguf"}


def _fetched(name: str, key: str) -> Path:
    folder = fetched_folder(name)
    if folder is None:
        raise ModelError(
            f"{key}: {name!r} is a model that ebft can fetch, and it is not on this machine yet. Type "
            f"`ebft fetch {name}` first."
        )
    return folder


def _ask_hub(name: str, kind: str, key: str, error: type[EBFTError]) -> None:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    assumed = f"{key}: {name!r} is not a path on this machine, so it was taken as a hub id"
    if kind == "model" and (near := nearest_model(name)) is not None:
        assumed += f" (`ebft fetch` has {near})"
    if constants.HF_HUB_OFFLINE:
        return  # the library reads its cache, or says at once what is missing there
    if kind == "model" and isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    api = HfApi()
    try:
        (api.dataset_info if kind == "dataset" else api.model_info)(name, timeout=REACH_TIMEOUT)
    except GatedRepoError as gated:
        raise error(f"{assumed}; its owner grants access on request: ask, then `hf auth login`.") from gated
    except (RepositoryNotFoundError, HFValidationError) as unknown:
        raise error(f"{assumed}, and the hub has no such {kind}. Correct the id or the path.") from unknown
    except Exception as unreachable:  # the client's transport errors have no common public base
        raise error(
            f"{assumed}, and the hub cannot be reached ({unreachable}). Give a local path, or set "
            "HF_HUB_OFFLINE=1 if the download is in the local cache."
        ) from unreachable
