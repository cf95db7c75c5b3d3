"""Which files of an output folder a run wrote: all others are neither moved nor replaced.

The files of the final model are listed in `ebft_final.json`, which a run writes when it starts. Files that describe the
run are recognised by their contents in folders without it, which an earlier version has written.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError, SaveError
from ebft.files import ADAPTER_CONFIG, CHECKSUMS, RUN_FILE, STAGING, STATE, checksum, write_text
from ebft.processes import is_main_process
from ebft.run_files import (
    CARD,
    EVALUATION,
    HEALTH,
    METRICS,
    MODEL_FILES,
    PREVIOUS,
    REPORT,
    RUN,
    START,
    is_report,
    parse,
    read_object,
    rollout_files,
)

MARK = "ebft_final.json"  # step (null if not complete), files with sizes, and checksums of the model card
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_STAGED = re.compile(r"final|push|rehearsal|checkpoint-\d+(\.old)?")
_ALWAYS = (
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_model*.safetensors"),
    *(ADAPTER_CONFIG, "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", STATE, "training_args.bin", RUN_FILE),
)  # of the final model of any run; without the files of single tokenizers and the code of single models
_SHOWN = 5  # names in an error


def check_own(config: RunConfig) -> None:
    """Raise ConfigError if the output folder has files that the run would move or replace, and that no run wrote."""
    folder = Path(config.output_dir)
    named = config.resume_from_checkpoint
    resumes = config.auto_resume_from_checkpoints or named is not None
    try:
        found = _foreign(folder, config.adapter is None, resumes) if folder.is_dir() else []
        found = [name for name in found if named is None or os.path.realpath(folder / name) != os.path.realpath(named)]
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be read ({error}). Choose another folder.") from error
    if not found:
        return
    names = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    others = any(_CHECKPOINT.fullmatch(name) for name in found)
    advice = " To continue from a checkpoint of another program, set resume_from_checkpoint to it." if others else ""
    raise ConfigError(
        f"output_dir: {folder} contains {names}, which this run would replace or move, and which no run has written "
        f"there. Set output_dir to a new folder, such as {folder / 'ebft-out'}, or move the files away.{advice}"
    )


def claim(folder: Path) -> None:
    """List the files of an earlier final model, if there is no list, so that what others add later is recognised.

    A README.md that is not the card of a run is kept, with a warning. Raises SaveError if the list cannot be written.
    """
    if not is_main_process():
        return
    card = folder / CARD
    try:
        if _mark(folder) is None:
            names = [*MODEL_FILES, *_ALWAYS] if _is_of_earlier_version(folder) else []
            found = [path for path in folder.iterdir() if path.is_file() and _matches(path.name, names)]
            files = {path.name: path.stat().st_size for path in found if path.suffix != ".py"}
            has_card = (folder / RUN_FILE).is_file() and card.is_file()
            write_mark(folder, None, files, [checksum(card)] if has_card else [])
        is_kept = not owns_card(folder)
    except OSError as error:
        raise SaveError.of(folder, error) from error
    if is_kept:
        warnings.warn(
            f"{card} was not written by a run, or was edited, so it is kept and no model card is written there.",
            stacklevel=2,
        )


def write_mark(folder: Path, step: int | None, files: dict[str, int], cards: Iterable[int]) -> None:
    """Write the list of the files of the final model, and of the checksums that its card may have."""
    write_text(folder / MARK, json.dumps({"step": step, "files": files, "cards": [*cards]}, indent=2) + "\n")


def listed(folder: Path) -> dict[str, int]:
    """The files of the final model in `folder`, with their sizes, also of one that is not complete."""
    found = (_mark(folder) or {}).get("files", {})
    return {name: size for name, size in found.items() if not Path(name).is_absolute() and ".." not in Path(name).parts}


def final_step(folder: Path) -> int | None:
    """The step of the final model in `folder`; None if there is none or if files are missing or truncated."""
    mark = _mark(folder) or {}
    try:
        complete = all((folder / name).stat().st_size == size for name, size in mark["files"].items())
        return mark["step"] if complete else None
    except (OSError, KeyError):
        return None


def cards(folder: Path) -> list[int]:
    """The checksums that the model card of the final model in `folder` may have; that of a list without them."""
    mark, card = _mark(folder) or {}, folder / CARD
    if mark.get("files") and "cards" not in mark and card.is_file():
        return [checksum(card)]
    return mark.get("cards", [])


def owns_card(folder: Path) -> bool:
    """Whether README.md in `folder` is the card of a run and was not edited, or does not exist."""
    card = folder / CARD
    return not os.path.lexists(card) or (card.is_file() and checksum(card) in cards(folder))


def final_files(folder: Path) -> list[Path]:
    """All files of the final model of an earlier run in `folder`, its model card as the last one, but not the list."""
    found = [path for name in sorted(listed(folder)) if (path := folder / name).is_file()]
    return [*found, folder / CARD] if found and (folder / CARD).is_file() and owns_card(folder) else found


def _mark(folder: Path) -> dict[str, Any] | None:
    mark = read_object(folder / MARK)
    return mark if mark is not None and isinstance(mark.get("files"), dict) else None


def _is_of_earlier_version(folder: Path) -> bool:
    """Whether a folder without a list has the final model of a run, or a run that began; not a copied checkpoint."""
    run = read_object(folder / RUN) or {}
    is_final = (folder / RUN_FILE).is_file() and not (folder / CHECKSUMS).exists()
    return is_final or bool(run.get("global_step"))


def _foreign(folder: Path, writes_config: bool, resumes: bool) -> list[str]:
    has_mark, known = _mark(folder) is not None, listed(folder)
    is_earlier = not has_mark and _is_of_earlier_version(folder)
    names = [*_ALWAYS, "config.json"] if writes_config else _ALWAYS
    found = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if _CHECKPOINT.fullmatch(name):
            is_own = _is_checkpoint(path, resumes or has_mark)
        elif name == STAGING:
            is_folder = path.is_dir() and not path.is_symlink()
            is_own = is_folder and all(_STAGED.fullmatch(each.name) for each in path.iterdir())
        elif name == PREVIOUS:
            is_own = path.is_dir()
        elif name in _RECORDS:
            is_own = (has_mark and name not in (EVALUATION, REPORT)) or _RECORDS[name](path)
        else:
            is_own = is_earlier or name in known or not _matches(name, names)
        found += [] if is_own else [name]
    return found + [path.name for path in rollout_files(folder) if not (has_mark or _has_steps(path))]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_checkpoint(folder: Path, of_others: bool) -> bool:
    """Whether a folder is a checkpoint of this package or, if `of_others`, of any trainer of transformers; or empty."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or bool(names & {RUN_FILE, CHECKSUMS, *([STATE] if of_others else [])})


def _has_state(path: Path) -> bool:
    return path.is_file() and (not path.stat().st_size or "global_step" in (read_object(path) or {}))


def _has_steps(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(2**20)
    return not first or "step" in (parse(first) or {})


_RECORDS: dict[str, Callable[[Path], bool]] = {
    RUN: _has_state,
    START: _has_state,
    METRICS: lambda path: path.is_file() and _has_steps(path),
    HEALTH: lambda path: path.is_file() and _has_steps(path),
    EVALUATION: lambda path: "models" in (read_object(path) or {}),
    REPORT: is_report,
}
