"""Folders that are repositories of datasets, such as clones from the Hub: their configurations, splits and files.

The library `datasets` resolves them from the card (README.md) or from the names of the files. Its own reader reads the
files only where the card has options, or where it gives other rows than the files have.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, DatasetBuilder, get_dataset_default_config_name, load_dataset_builder

from ebft import errors, machine, printed
from ebft.data.file_formats import files_below, kind_of, read_files, refuse_pointers
from ebft.data.tables import reading

logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # that a card has no header
_CARD = "README.md"
_INFOS = "dataset_infos.json"  # of old repositories
_NOTICE = re.compile(r"(readme|licen[cs]e|notice|citation|changelog)\b.*", re.IGNORECASE)
_said: set[str] = set()  # lines that this process has printed
_OF_ALL = ("name", "version", "data_dir", "data_files", "description", "features")  # not options of a reader


class Repository(NamedTuple):
    """A configuration of a repository; `files` are the files of each split."""

    source: str
    builder: DatasetBuilder
    kind: str  # of the files
    files: Mapping[str, list[Path]]

    @property
    def is_read_by_library(self) -> bool:
        """Whether the reader of the library gives its rows: lines of texts, or options in the card."""
        if self.kind not in ("json", "csv", "parquet", "arrow"):
            return True
        config = self.builder.config
        plain = type(config)()
        names = [each.name for each in fields(config) if each.name not in _OF_ALL]
        has_types = self.kind == "csv" and self.builder.info.features is not None
        return has_types or any(getattr(config, name) != getattr(plain, name) for name in names)

    def of_split(self, split: str) -> list[tuple[Path, str]]:
        """The files of a split with their format. Raises DataError that names the splits if there is no such split."""
        if split not in self.files:
            raise errors.DataError(
                f"{self.source}: no split {split!r} in the configuration {self.builder.config.name}. Available splits: "
                f"{', '.join(self.files)}."
            )
        return [(path, self.kind) for path in self.files[split]]

    def rows(self, split: str) -> Dataset:
        """The rows of a split. Raises DataError as `of_split` does."""
        files = self.of_split(split)
        if not self.is_read_by_library:
            return read_files(files, self.source)
        with reading(self.source):
            self.builder.download_and_prepare(verification_mode="no_checks")  # the card may be older than the files
            return self.builder.as_dataset(split=split)


def is_repository(folder: Path) -> bool:
    """Whether a folder has a card that lists its files or columns, or a card and tables of one format.

    Without a header in the card, there may be no other texts than notices, such as a licence: a folder of code is none.
    """
    if not (folder / _CARD).is_file():
        return (folder / _INFOS).is_file()
    text = (folder / _CARD).read_text(encoding="utf-8", errors="replace")
    found = re.match(r"\s*---\s*\n(.*?)\n---", text, re.DOTALL)
    header = set(re.findall(r"^([\w-]+):", found.group(1), re.MULTILINE)) if found else set()
    if header & {"configs", "dataset_info"} or (folder / _INFOS).is_file():
        return True
    kinds = {kind_of(path.name) for path in files_below(folder) if not _NOTICE.fullmatch(path.name)}
    return len(kinds - {"text", None}) == 1 and (bool(header) or "text" not in kinds)


def repository_of(folder: Path, entry: Any) -> Repository | None:
    """The repository at the `path` of an entry, with its configuration `name`; None for other folders and files."""
    if entry.data_files or not folder.is_dir() or not is_repository(folder):
        return None
    place = str(folder.resolve())
    with errors.doing(f"reading the dataset repository {entry.path}, with name: {entry.name}"):
        name = entry.name or get_dataset_default_config_name(place)
        builder = load_dataset_builder(place, name)
    kind = type(builder.config).__module__.rpartition(".")[2]
    if entry.ds_type not in (None, kind):
        raise errors.DataError(f"{entry.path}: ds_type: {entry.ds_type}, but this dataset repository has {kind} files.")
    files = {str(split): [Path(path) for path in paths] for split, paths in builder.config.data_files.items()}
    refuse_pointers([path for paths in files.values() for path in paths], entry.path)
    read = {path for paths in files.values() for path in paths}
    left = ", ".join(str(path.relative_to(folder)) for path in files_below(folder) if path.resolve() not in read)
    line = f"{entry.path}: dataset repository, configuration {name}, splits {', '.join(files)}; not read: "
    if machine.is_main_process() and line not in _said:
        _said.add(line)
        printed.say(line + errors.shortened(left), err=True)
    return Repository(entry.path, builder, kind, files)


def card_of(folder: Path) -> list[Path]:
    """The files that determine what a repository consists of."""
    return [folder / name for name in (_CARD, _INFOS) if (folder / name).is_file()]
