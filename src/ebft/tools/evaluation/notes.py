"""Notes about what an evaluation can show: too few documents, and documents that a model was trained on.

A model that `ebft train` saved is in a folder with run.json, which has the datasets of the run. Its training documents
are read again and compared with the evaluated ones by their text, so that copies in other files are found as well.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ebft.catalog import lasting_name, looks_local
from ebft.config.keys.data import DatasetEntry
from ebft.data.sources import NOT_TEXT, RawRows, content_digest, read_source
from ebft.errors import DataError
from ebft.files import exists
from ebft.run_files import read_object, run_of_model
from ebft.tools.evaluation.task import HeldOut

FEWEST_DOCUMENTS = 8
MOST_READ = 500_000  # training documents of a run whose text is compared


def notes_on(names: list[str], held_out: HeldOut) -> list[str]:
    """Sentences about the evaluation of the models `names` on `held_out`; usually none."""
    documents = sorted(set(held_out.documents))
    notes = []
    if len(documents) < FEWEST_DOCUMENTS:
        notes.append(
            f"Only {len(documents)} documents are evaluated. With fewer than {FEWEST_DOCUMENTS}, intervals over "
            "documents are unreliable, and differences between models may be due to chance. Evaluate on more documents."
        )
    records = {name: list(_runs(name)) for name in names}
    if any(records.values()):
        evaluated = TextIndex([row_texts(held_out.raw[document]) for document in documents])
        notes += [note for name in names if (note := _trained_on(name, records[name], evaluated, held_out))]
    return notes


def _runs(name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The run.json and config of the run that trained the model, then of the one that trained its base model, etc."""
    waiting, seen = [name], set()
    while waiting:
        found = run_of_model(Path(lasting_name(waiting.pop())))
        if found is not None and found[0] not in seen:
            seen.add(found[0])
            yield found
            waiting += [base for key in ("lora_model_dir", "base_model") if isinstance(base := found[1].get(key), str)]


def _trained_on(
    name: str, runs: list[tuple[Path, dict[str, Any]]], evaluated: TextIndex, held_out: HeldOut
) -> str | None:
    """A note if evaluated documents are among the training documents of `runs`, or if this cannot be found out."""
    found, sources, problems, in_part = set(), [], [], False
    for path, config in runs:
        shared: set[int] = set()
        try:
            for row in _training_documents(path, config, held_out.entries):
                shared.update(evaluated.same_as(row_texts(row)))
        except Exception as error:  # the evaluation does not depend on it
            reason = str(error) if isinstance(error, DataError) else f"its datasets cannot be read from {path}"
            problems.append(reason)
            continue
        if shared:
            found |= shared
            sources.append(str(path))
            in_part |= any((entry.get("weight") or 1) < 1 for entry in config["datasets"])
    if found:
        selected = ", or were left out by a weight below 1" if in_part else ""
        return (
            f"--model {name}: {len(found):,} of the {len(evaluated):,} evaluated documents are training documents of "
            f"its run ({', '.join(sources)}){selected}, so its results on these "
            "documents are not results on unseen data. Evaluate on other documents (test_datasets)."
        )
    if problems:
        return f"--model {name}: whether it was trained on evaluated documents is not known: {problems[0]}"
    return None


def _training_documents(path: Path, config: dict[str, Any], evaluated: list[Any]) -> Iterator[dict[str, Any]]:
    """The raw rows that the run with this run.json and config was trained on, without the rows of val_set_size.
    Datasets of the Hub are read only if the evaluated data are of the same dataset, which is on this machine. Raises
    DataError if one cannot be read or has changed since the run, or if there are too many documents."""
    entries = [DatasetEntry.model_validate(entry) for entry in config["datasets"]]
    on_hub = {(entry.path, entry.name) for entry in evaluated}
    size = None if config.get("test_datasets") else config.get("val_set_size")
    is_local = lambda entry: exists(Path(entry.path)) or looks_local(entry.path) or bool(entry.data_files)
    known = [is_local(entry) or (entry.path, entry.name) in on_hub for entry in entries]
    if size and not all(known):
        raise DataError("a part of its datasets is on the Hub, so the split of val_set_size cannot be repeated.")
    recorded = (read_object(path) or {}).get("data_digests")
    is_known = isinstance(recorded, list) and len(recorded) == len(entries)  # not of another program or version
    for entry, digest in zip(entries, recorded) if is_known else ():
        if digest is not None and content_digest(entry) not in (digest, None):
            raise DataError(f"{entry.path} has changed since the run, so its training documents are not known.")
    sources = [read_source(entry) for entry, is_known in zip(entries, known) if is_known]
    documents = RawRows(entries, sources)
    if len(documents) > MOST_READ:
        raise DataError(f"its run has {len(documents):,} training documents, more than are compared ({MOST_READ:,}).")
    held = set(documents.held_out(size, config["seed"]).tolist()) if size else set()
    for document, row in enumerate(documents):
        if document not in held:
            yield row


def row_texts(row: Mapping[str, Any]) -> frozenset[str]:
    """The texts of a row, nested ones included, without differences of white space. Texts that are JSON objects or
    lists, such as the lines that some transforms parse, count as their content. A row without text, such as one of
    token ids, is one text of all its values."""
    found = frozenset(_texts(row))
    if found:
        return found
    values = {name: value for name, value in row.items() if value is not None}
    return frozenset([json.dumps(values, sort_keys=True, default=str)])


def _texts(value: Any, parses: bool = True) -> Iterator[str]:
    if isinstance(value, str):
        text, nested = " ".join(value.split()), None
        if parses and text[:1] in ("{", "["):
            with suppress(ValueError, RecursionError):
                nested = json.loads(value)
        if nested is not None:
            yield from _texts(nested, parses=False)
        elif text:
            yield text
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in NOT_TEXT:
                yield from _texts(item, parses)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, parses)


class TextIndex:
    """Finds the `documents`, each the texts of `row_texts`, that have the same text as another row. Two documents are
    the same if all texts of one are in the other, and are at least half of its characters, so that additional columns
    do not matter."""

    def __init__(self, documents: list[frozenset[str]]) -> None:
        self._documents = documents
        self._with: dict[str, list[int]] = defaultdict(list)
        for number, texts in enumerate(documents):
            for text in texts:
                self._with[text].append(number)
        # Each document is looked up by its text that the fewest others have, since many may share a system prompt.
        self._known_by: dict[str, list[int]] = defaultdict(list)
        for number, texts in enumerate(documents):
            self._known_by[min(texts, key=lambda text: (len(self._with[text]), -len(text)))].append(number)

    def __len__(self) -> int:
        return len(self._documents)

    def same_as(self, texts: frozenset[str]) -> Iterable[int]:
        """The numbers of the documents with the same text as a row with these texts."""
        larger = {number for text in texts for number in self._known_by.get(text, ())}
        found = {number for number in larger if _is_most(self._documents[number], texts)}
        if all(text in self._with for text in texts):
            rarest = min((self._with[text] for text in texts), key=len)
            found |= {number for number in rarest if _is_most(texts, self._documents[number])}
        return found


def _is_most(part: frozenset[str], whole: frozenset[str]) -> bool:
    return part <= whole and 2 * sum(map(len, part)) >= sum(map(len, whole))
