"""What happened to the documents of a section of the config: how many rows they gave, and why some were dropped."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from ebft.data.lengths import DROPPED, SPLIT, TRUNCATED
from ebft.data.transforms.omissions import LEFT_OUT, UNTHINKING

NAMED = 3  # documents that are named per reason


class RowCounts(Counter):
    """Number of rows by reason, with the first documents of each reason."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: dict[str, list[int]] = defaultdict(list)

    def note(self, reason: str, documents: list[int]) -> None:
        """Remember some of the documents of a reason, without counting them."""
        known = self.documents[reason]
        known += [document for document in dict.fromkeys(documents) if document not in known][: NAMED - len(known)]


@dataclass(frozen=True)
class SectionReport:
    """The documents and rows of `datasets` or `test_datasets`.

    `counts` are the numbers of rows by reason; `examples` names some documents of each reason by source and row.
    """

    section: str
    documents: int
    rows: int
    counts: dict[str, int]
    examples: dict[str, list[str]]

    def __str__(self) -> str:
        notes = [
            f"{self.counts[what]:,} {what}"
            for what in (SPLIT, TRUNCATED, LEFT_OUT, UNTHINKING)
            if self.counts.get(what)
        ]
        dropped = [f"{self.counts[reason]:,} {reason}" for reason in DROPPED if self.counts.get(reason)]
        line = f"{self.section}: {_counted(self.documents, 'document')} produced {_counted(self.rows, 'row')}"
        if notes:
            line += f" ({', '.join(notes)})"
        return f"{line}; dropped {', '.join(dropped)}" if dropped else line

    def with_example(self) -> str:
        """The report as text, with the source and row of a document that was dropped, if there is one."""
        example = next((self.examples[reason][0] for reason in DROPPED if self.examples.get(reason)), None)
        return str(self) if example is None else f"{self} (for example {example})"


def report(section: str, documents: int, rows: int, counts: RowCounts, sources: list[tuple[str, int]]) -> SectionReport:
    """The report of a section; `sources` are its sources, with the number of the first document of each."""
    examples = {
        reason: [_location(document, sources) for document in found]
        for reason, found in counts.documents.items()
        if counts[reason]
    }
    return SectionReport(section, documents, rows, {name: n for name, n in counts.items() if n}, examples)


def _location(document: int, sources: list[tuple[str, int]]) -> str:
    name, first = next((name, first) for name, first in reversed(sources) if first <= document)
    return f"{name}, row {document - first}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
