"""Pushes to the Hub: the files of the model and, if wanted, of checkpoints, and nothing else of a run.

The lists are in `run_files.py`. Each push is one commit, made here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi

from ebft.errors import cause, warn
from ebft.files import CHECKSUMS, RUN_FILE
from ebft.run_files import CARD, LEFT_OUT, MODEL_FILES, read_object

# Keys of JSON files whose values may be paths of this machine; only their last part is pushed.
_NAMES = ("base_model_name_or_path", "_name_or_path", "name_or_path", "base_model")
_PATHS = {*_NAMES, "best_model_checkpoint", "gguf_file"}
_OF_RUN = _PATHS | {"chat_template", "nemo_gym_config_paths"}


def pushed_files(folder: Path, names: Iterable[str] | None = None, tokenizer: Any = None) -> list[Path]:
    """The files of the model in `folder` that are pushed: of `names`, or of all files."""
    listed = [*MODEL_FILES, *getattr(tokenizer, "vocab_files_names", {}).values()]
    found = sorted(path.name for path in folder.iterdir()) if names is None else sorted(names)
    wanted = [name for name in found if "/" not in name and any(fnmatch(name, pattern) for pattern in listed)]
    return [folder / name for name in wanted if (folder / name).is_file()]


def commit(
    repo_id: str,
    files: dict[str, Path],
    message: str,
    card: str | None = None,
    token: str | None = None,
    revision: str | None = None,
) -> Any:
    """Push `files`, by their paths in the repository, and the model card."""
    operations = [CommitOperationAdd(name, _public(path)) for name, path in files.items()]
    if card is not None:
        operations.append(CommitOperationAdd(CARD, card.encode()))
    return HfApi().create_commit(repo_id, operations, commit_message=message, token=token, revision=revision)


def _public(path: Path) -> str | bytes:
    """The path of a file to push, or its contents without the names of folders of this machine."""
    if path.suffix != ".json" or path.name == "tokenizer.json":
        return str(path)
    if (content := read_object(path)) is None:
        return str(path)
    if path.name == CHECKSUMS:
        kept = {name: value for name, value in content.items() if Path(name).name not in LEFT_OUT}
        return (json.dumps(kept, indent=2) + "\n").encode()
    public = _without_folders(content, _OF_RUN if path.name == RUN_FILE else _PATHS)
    return str(path) if public == content else (json.dumps(public, indent=2) + "\n").encode()


def _without_folders(value: Any, keys: set[str], is_path: bool = False) -> Any:
    """A JSON value with the last part of each local path below one of `keys`."""
    if isinstance(value, dict):
        return {key: _without_folders(inner, keys, key in keys) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner, keys, is_path) for inner in value]
    if not is_path or not isinstance(value, str):
        return value
    is_local = os.path.isabs(value) or value.startswith(("~", ".")) or os.path.exists(value)
    return Path(value).name if is_local else value


class Pushing:
    """The pushes of a trainer: in the background, in their order; a failed one of a checkpoint gives a warning."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._api = HfApi()  # which has one thread
        self._jobs: dict[Path, Future] = {}  # by checkpoint
        self._failed: list[Path] = []

    @property
    def needs_files(self) -> bool:
        """Whether checkpoints are being pushed, or have to be, so that their files are still needed."""
        return bool(self._failed) or any(not job.done() or job.exception() for job in self._jobs.values())

    @property
    def _strategy(self) -> str:
        return str(self.trainer.args.hub_strategy.value)

    def push_model(self, folder: Path, message: str, token: str | None, revision: str | None) -> Future:
        """Push the model and the tokenizer that are saved in `folder`."""
        self.finish()
        return self._start(self._begin(folder), message, token, revision)

    def push_checkpoint(self, folder: Path) -> None:
        """Push the model of a saved checkpoint, and its other files if `hub_strategy` includes them.

        It replaces checkpoints that wait for an earlier push, and failed ones, except with `all_checkpoints`. A
        checkpoint in parts has no files of a model.
        """
        if not self.trainer.is_world_process_zero() or self._strategy == "end":
            return
        is_replaced = self._strategy != "all_checkpoints"
        for other, job in [*self._jobs.items()]:
            if job.done():
                self._collect(other)
            elif is_replaced and job.cancel():
                del self._jobs[other]
        self._failed = [] if is_replaced else self._failed
        self._push(folder)

    def push_remaining(self) -> None:
        """Wait for the pushes of checkpoints, at the end of training; failed ones are tried once more."""
        self.finish()
        failed, self._failed = self._failed, []
        for folder in failed if self._strategy != "every_save" else ():  # the model is pushed soon
            self._push(folder)
        self.finish()
        self._failed = []

    def finish(self) -> None:
        """Wait for the pushes of checkpoints; each failed one gives a warning."""
        for folder in [*self._jobs]:
            self._collect(folder)

    def _collect(self, folder: Path) -> None:
        try:
            self._jobs.pop(folder).result()
        except Exception as error:  # the client's transport errors have no common public base class
            self._failed.append(folder)
            warn(
                f"{folder} was not pushed to {self.trainer.hub_model_id} ({cause(error)}). It is saved here; the next "
                "save and the end of training are pushed too."
            )

    def _push(self, folder: Path) -> None:
        """Start to push a checkpoint, unless it was deleted."""
        if not folder.is_dir():
            return
        found = self._begin(folder)
        files = found if any(path.suffix in (".safetensors", ".bin") for path in found.values()) else {}
        if self._strategy != "every_save":
            target = "last-checkpoint" if self._strategy == "checkpoint" else folder.name
            read = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in LEFT_OUT)
            files |= {f"{target}/{path.relative_to(folder).as_posix()}": path for path in read}  # by resuming
        if files:
            self._jobs[folder] = self._start(files, f"Training in progress, step {folder.name.rpartition('-')[2]}")

    def _begin(self, folder: Path) -> dict[str, Path]:
        """Report a push to the callbacks, and return the files of the model in `folder`."""
        trainer = self.trainer
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        return {path.name: path for path in pushed_files(folder, tokenizer=trainer.processing_class)}

    def _start(
        self, files: dict[str, Path], message: str, token: str | None = None, revision: str | None = None
    ) -> Future:
        args, card = self.trainer.args, None if self.trainer.card is None else self.trainer.card()
        token, revision = token or args.hub_token, revision or args.hub_revision
        return self._api.run_as_future(commit, self.trainer.hub_model_id, files, message, card, token, revision)
