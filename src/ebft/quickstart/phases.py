"""Phases of the quickstart: what each one made is kept, stamped with what it was made from, and used again."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebft.printed import safe_console

console = safe_console(soft_wrap=True)


class Phases:
    """Headings with running numbers, and the seconds that each phase took."""

    def __init__(self, count: int):
        self.count = count
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, heading: str) -> Iterator[None]:
        """Print the heading, and keep the time that the block takes under `name`."""
        console.print(f"\n[bold cyan]{len(self.seconds) + 1}/{self.count}  {heading}")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 1)
        console.print(f"[dim]{self.seconds[name]:.1f} s")


def make_once(folder: Path, made_from: Any, make: Callable[[], Any]) -> None:
    """Call `make`, which fills `folder`, unless an earlier run finished it from the same `made_from`, and say so."""
    stamp, mark = folder / "made_from.json", fingerprint(made_from)
    if _is_made(stamp, mark):
        console.print(f"[green]Made by an earlier run, and used again: {folder}")
        return
    stamp.unlink(missing_ok=True)
    make()
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    stamp.write_text(json.dumps({"made_from": mark, "files": sizes}))  # last: what was interrupted is made again


def _is_made(stamp: Path, mark: str) -> bool:
    """Whether a folder was made from what `mark` stands for, and all of its files are there."""
    try:
        made = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return False
    paths = {stamp.parent / name: size for name, size in made["files"].items()}
    return made["made_from"] == mark and all(p.is_file() and p.stat().st_size == size for p, size in paths.items())


def fingerprint(value: Any) -> str:
    """A short text that changes with any part of a JSON-like value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
