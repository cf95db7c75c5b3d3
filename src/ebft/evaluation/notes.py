"""Notes about what an evaluation can show: too few documents, and documents that a model was trained on.

A model that `ebft train` saved is in a folder with run.json, which has the datasets of the run. Its training documents
are read again and compared with the evaluated ones by their text, so that copies in other files are found as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from pydantic import ValidationError

from ebft.dashboard.files import read_object
from ebft.dashboard.run import run_of_model
from ebft.data.fingerprint import content_digest
from ebft.data.keys import DatasetEntry
from ebft.data.load import held_documents
from ebft.data.locate import lasting_name, looks_local
from ebft.data.sources import read_source
from ebft.errors import DataError
from ebft.evaluation.rows import HeldOut
from ebft.evaluation.same_text import TextIndex, texts_of
from ebft.paths import exists

FEWEST_DOCUMENTS = 8
MOST_READ = 500_000  # training documents of a run whose text is compared
_REMEDY = "its results on them are not those of unseen data. Evaluate on other documents (test_datasets)."


def notes_on(names: list[str], held_out: HeldOut) -> list[str]:
    """Sentences about the evaluation of the models `names` on `held_out`; usually none."""
    documents = sorted(set(held_out.documents))
    notes = []
    if len(documents) < FEWEST_DOCUMENTS:
        notes.append(
            f"Only {_counted(len(documents))} evaluated. With fewer than {FEWEST_DOCUMENTS}, intervals over "
            "documents are unreliable, and differences between models may be due to chance. Evaluate on more documents."
        )
    records = {name: list(_runs(name)) for name in names}
    if any(records.values()):
        evaluated = TextIndex([texts_of(held_out.raw(document)) for document in documents])
        notes += [note for name in names if (note := _trained_on(name, records[name], evaluated, held_out))]
    return notes


def _counted(number: int) -> str:
    return "1 document is" if number == 1 else f"{number:,} documents are"


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
                shared.update(evaluated.same_as(texts_of(row)))
        except (DataError, ValidationError, TypeError, ValueError, KeyError) as error:
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
            f"its run ({', '.join(sources)}){selected}, so {_REMEDY}"
        )
    if problems:
        return f"--model {name}: whether it was trained on evaluated documents is not known: {problems[0]}"
    return None


def _training_documents(path: Path, config: dict[str, Any], evaluated: list[Any]) -> Iterator[dict[str, Any]]:
    """The raw rows that the run with this run.json and config was trained on; those of val_set_size are not.

    Datasets of the Hub are read only if the evaluated data are of the same dataset, which is on this machine.
    Raises DataError if one cannot be read or has changed since the run, or if there are too
    many documents.
    """
    entries = [DatasetEntry.model_validate(entry) for entry in config["datasets"]]
    on_hub = {(entry.path, entry.name) for entry in evaluated}
    size = None if config.get("test_datasets") else config.get("val_set_size")
    known = [_is_local(entry) or (entry.path, entry.name) in on_hub for entry in entries]
    if size and not all(known):
        raise DataError("a part of its datasets is on the Hub, so the split of val_set_size cannot be repeated.")
    _check_unchanged(path, entries)
    sources = [read_source(entry) for entry, is_known in zip(entries, known) if is_known]
    count = sum(map(len, sources))
    if count > MOST_READ:
        raise DataError(f"its run has {count:,} training documents, more than are compared ({MOST_READ:,}).")
    held = set(held_documents(count, size, config["seed"]).tolist()) if size else set()
    for document, row in enumerate(row for source in sources for row in _rows(source)):
        if document not in held:
            yield row


def _check_unchanged(path: Path, entries: list[DatasetEntry]) -> None:
    """Raise DataError if the files of an entry are not those that were recorded when the run began."""
    recorded = (read_object(path) or {}).get("data_digests")
    if not isinstance(recorded, list) or len(recorded) != len(entries):  # run.json of another program or version
        return
    for entry, digest in zip(entries, recorded):
        if digest is not None and content_digest(entry) not in (digest, None):
            raise DataError(f"{entry.path} has changed since the run, so its training documents are not known.")


def _is_local(entry: DatasetEntry) -> bool:
    return exists(Path(entry.path)) or looks_local(entry.path) or bool(entry.data_files)


def _rows(source: Dataset) -> Iterator[dict[str, Any]]:
    for batch in source.iter(batch_size=1000):
        names = list(batch)
        yield from (dict(zip(names, values)) for values in zip(*batch.values()))
