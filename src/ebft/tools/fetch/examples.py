"""The example configs of the installed package, and its configs of DeepSpeed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ebft.errors import FetchError


def examples_folder() -> Path:
    """The folder of the examples in the package."""
    return Path(str(files("ebft") / "examples"))


def example_files() -> list[Path]:
    """The configs, and the modules with the functions that some of them name."""
    folder = examples_folder()
    return sorted([*folder.glob("*.yaml"), *folder.glob("*.py"), *folder.glob("quickstart/*.yaml")])


def copy_examples(to: Path, force: bool = False) -> list[Path]:
    """Copy every example into the folder `to` and return the copies. Raises FetchError, see `copy_files`."""
    folder = examples_folder()
    return copy_files({path: path.relative_to(folder) for path in example_files()}, to, force, "examples")


def copy_files(sources: dict[Path, Path], to: Path, force: bool, name: str) -> list[Path]:
    """Copy files of the package, `name` in `ebft fetch`, into the folder `to` and return the copies.

    `sources` maps each file to the path of its copy in `to`.

    Raises FetchError, without copying anything, if a file exists with different content and `force` is false.
    """
    copies = {to / path: source.read_bytes() for source, path in sources.items()}
    changed = [str(path.relative_to(to)) for path, content in copies.items() if _is_changed(path, content)]
    if changed and not force:
        raise FetchError(
            f"Different files in {to} would be overwritten: {', '.join(changed)}. Copy to another folder "
            f"(`ebft fetch {name} DIR`), or overwrite them with --force."
        )
    try:
        for path, content in copies.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise FetchError(
            f"Cannot write {name} to {to}: {error.strerror} ({error.filename}). Choose another folder."
        ) from error
    return list(copies)


def _is_changed(path: Path, content: bytes) -> bool:
    try:
        return path.exists() and path.read_bytes() != content
    except OSError as error:  # a folder, or a file that this user may not read
        raise FetchError(f"Cannot replace {path}: {error.strerror}. Choose another folder.") from error
