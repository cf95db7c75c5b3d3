"""Columns of raw rows and a note of what is read; what became of the rows of a section: numbers by reason, and the
report that names examples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ebft.errors import DataError, EBFTError

if TYPE_CHECKING:
    from ebft.data.sources import RawRows


_MISSING = object()


class Columns(dict):
    """A raw row; `read` are the columns that `value_of` has returned the value of."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        self.read: set[str] = set()


def _find(row: Mapping[str, Any], name: str) -> Any:
    if name in row or "." not in name:
        return row.get(name, _MISSING)
    value: Any = row
    for key in name.split("."):
        if value is None:
            return None
        value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def has_column(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column, or a message a key; `a.b` is the key b of a, which may be missing as a whole."""
    return _find(row, name) is not _MISSING


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column; `a.b` is the key b of column a, unless a column has this name. Raises KeyError."""
    value = _find(row, name)
    if value is _MISSING:
        raise KeyError(name)
    if isinstance(row, Columns):
        row.read.add(name if name in row else name.partition(".")[0])
    return value


def text_of(row: Mapping[str, Any], column: str) -> str:
    """The text in a column, empty for a missing value. Raises DataError if it is not text."""
    value = value_of(row, column)
    if not isinstance(value, str | None):
        raise DataError(f"column {column!r} must contain text, got {type(value).__name__}")
    return value or ""


def optional_text(row: Mapping[str, Any], column: str) -> str:
    """The text in a column, empty if the row does not have it."""
    return text_of(row, column) if has_column(row, column) else ""


def first_shape(row: Mapping[str, Any], shapes: Iterable[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The first of `shapes`, names of columns, that the row has; one with values before others, None if there is none.

    Rows of a source can have different shapes: then each has the columns of all, without values.
    """
    found = [names for names in shapes if all(has_column(row, name) for name in names)]
    filled = (names for names in found if all(_find(row, name) is not None for name in names))
    return next(filled, found[0] if found else None)


def first_present(row: Mapping[str, Any], columns: Iterable[str], wanted: str, fix: str) -> str:
    """The first of `columns` that the row has. Raises DataError with what is `wanted` and how to `fix` it."""
    found = first_shape(row, [(column,) for column in columns])
    if found is None:
        raise DataError(
            f"no column with {wanted}: expected {', '.join(columns)}, but the row has {', '.join(row)}. {fix}"
        )
    return found[0]


# Columns with content that models are not trained on, and what to do if one was not read.
_MEDIA = {
    f"{name}{ending}": "content, but models are trained on text only. Remove the column if the texts are complete "
    "without it, or the row"
    for name in ("image", "audio", "video")
    for ending in ("", "s")
}
_SYSTEM = (
    "text, but this type has no place for a system message. Use a type of chats, a mapping of columns as type "
    "with {system} in prompt_format, or set drop_system_message: true to leave it out"
)


def _has_content(value: Any) -> bool:
    """Whether a value is more than empty texts, lists and mappings, as rows without an image have."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_content, value.values() if isinstance(value, Mapping) else value))
    return bool(value.strip()) if isinstance(value, str | bytes) else value is not None


def check_unread(row: Columns, system: str | None) -> None:
    """Raise DataError for a column with content that must not be left out and was not read: media, and `system`."""
    for name, problem in {**_MEDIA, **({system: _SYSTEM} if system else {})}.items():
        if name not in row.read and _has_content(row.get(name)):
            raise DataError(f"column {name!r} has {problem}.")


# Reasons for dropping rows, worded to follow "dropped 12 ".
EMPTY = "without text"
NO_REFERENCE = "without a reference"
PROMPT_TOO_LONG = "whose prompt leaves no room within sequence_len"
TOO_LONG = "longer than sequence_len"
BELOW_MINIMUM = "shorter than min_sample_len"
REPEATED = "equal to an earlier row"
TOO_SHORT = "too short for one block"
TAIL = "ends of long documents too short for one block"
ONE_TOKEN = "with a single token"
NOTHING_TO_PREDICT = "windows of long documents without a token to train on"
NO_PROMPT = "without a prompt"
SAME_ROLE = "with two turns of the same role in a row"
EMPTY_TURN = "with an empty turn"
NO_REPLY = "without a chosen or a rejected reply"
REPLY_TOO_LONG = "whose chosen or rejected text exceeds sequence_len"
NO_STEP = "without a labelled step within sequence_len"
REFERENCE_TOO_LONG = "whose prompt and reference do not fit within sequence_len"
NO_COMPLETION = "without a completion (or with only one of chosen and rejected)"
COMPLETION_TOO_LONG = "whose prompt and completions do not fit within sequence_len"
DROPPED = (
    *(EMPTY, NO_PROMPT, SAME_ROLE, EMPTY_TURN, NO_REFERENCE, PROMPT_TOO_LONG, REFERENCE_TOO_LONG, NO_COMPLETION),
    *(COMPLETION_TOO_LONG, TOO_LONG, TOO_SHORT, TAIL, ONE_TOKEN, NOTHING_TO_PREDICT, NO_REPLY, REPLY_TOO_LONG),
    *(NO_STEP, REPEATED, BELOW_MINIMUM),
)
OF_LENGTH = (TOO_SHORT, PROMPT_TOO_LONG, REFERENCE_TOO_LONG, COMPLETION_TOO_LONG)  # which settings determine
# Other counts.
TRUNCATED = "truncated at sequence_len"
SPLIT = "cut into windows of sequence_len"
LEFT_OUT = "with thinking of earlier turns, which the chat template leaves out"
UNTHINKING = (
    "with turns that are trained on without their thinking, which the chat template leaves out of earlier turns; "
    "ebft_strided_chat.transform_all_turns keeps it"
)
UNKNOWN = "with text that the tokenizer does not know, and replaces with its unknown token"
EQUAL = "whose completions are equal, so that neither is preferred"
LOST = (UNKNOWN, LEFT_OUT, UNTHINKING, EQUAL)
NOTES = (SPLIT, TRUNCATED, *LOST)


class Dropped(EBFTError):
    """A row is dropped, for one of the reasons above. Not an error: the row is counted."""


_lost: set[str] = set()  # of the rows that were checked since `take_lost` was called


def note_lost(what: str) -> None:
    """Note what the row that is being checked loses: one of LOST."""
    _lost.add(what)


def take_lost() -> str:
    """The note of the report for the rows that were checked since the last call, empty if nothing was lost."""
    found = max(_lost, key=LOST.index, default="")
    _lost.clear()
    return found


NAMED = 3  # documents that are named per reason


@dataclass(frozen=True)
class SectionReport:
    """The documents and rows of `datasets` or `test_datasets`.

    `counts` are the numbers of rows by reason; `examples` names some documents of each reason, by file or by source and
    row. `largest` is the document with over half of the rows, and their number, if there are other documents.
    """

    section: str
    documents: int
    rows: int
    counts: dict[str, int]
    examples: dict[str, list[str]]
    largest: tuple[str, int] | None = None

    def __str__(self) -> str:
        given = ((self.documents, "document"), (self.rows, "row"))
        documents, rows = (f"{number:,} {noun}{'s' * (number != 1)}" for number, noun in given)
        notes, dropped = (
            ", ".join(f"{self.counts[reason]:,} {reason}" for reason in reasons if self.counts.get(reason))
            for reasons in (NOTES, DROPPED)
        )
        noted, ending = f" ({notes})" if notes else "", f"; dropped {dropped}" if dropped else ""
        largest = "" if self.largest is None else f"; {self.largest[1]:,} of the rows are of {self.largest[0]}"
        return f"{self.section}: {documents} produced {rows}{noted}{largest}{ending}"

    def mostly_dropped(self) -> str | None:
        """What became of over half of the documents, if they have no rows because of their lengths."""
        dropped = sum(self.counts.get(reason, 0) for reason in OF_LENGTH)
        if dropped <= self.documents / 2:
            return None
        reasons = ", ".join(reason for reason in OF_LENGTH if self.counts.get(reason))
        return f"{dropped:,} of {self.documents:,} documents are dropped ({reasons})"

    def with_example(self) -> str:
        """The report as text, with the place of a document that was dropped, if there is one."""
        example = next((self.examples[reason][0] for reason in DROPPED if self.examples.get(reason)), None)
        return str(self) if example is None else f"{self} (for example {example})"


class RowCounts(Counter):
    """Number of rows by reason, with the first documents of each reason."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: dict[str, list[int]] = defaultdict(list)

    def add(self, reason: str, documents: list[int]) -> None:
        """Count one row of each of these documents, and remember the first ones."""
        self[reason] += len(documents)
        known = self.documents[reason]
        known += [document for document in dict.fromkeys(documents) if document not in known][: NAMED - len(known)]

    def report(self, section: str, owners: Sequence[int], documents: RawRows) -> SectionReport:
        """The report of a section, given the document of each of its rows."""
        found = {reason: numbers for reason, numbers in self.documents.items() if self[reason]}
        examples = {reason: [documents.place(each) for each in some] for reason, some in found.items()}
        most, rows = Counter(list(owners)).most_common(1)[0] if len(owners) else (0, 0)
        is_most = rows > max(1, len(owners) / 2) and len(documents) > 1
        largest = (documents.place(most), rows) if is_most else None
        counts = {reason: self[reason] for reason in found}
        return SectionReport(section, len(documents), len(owners), counts, examples, largest)
