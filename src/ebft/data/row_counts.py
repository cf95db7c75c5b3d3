"""What became of the rows of a section: numbers of rows by reason, and the report that names examples."""

from collections import Counter, defaultdict
from dataclasses import dataclass

# Reasons for dropping rows, worded to follow "dropped 12 ".
EMPTY = "without text"
NO_REFERENCE = "without a reference"
PROMPT_TOO_LONG = "whose prompt leaves no room within sequence_len"
TOO_LONG = "longer than sequence_len"
REPEATED = "equal to an earlier row"
TOO_SHORT = "too short for one block"
TAIL = "ends of long documents too short for one block"
ONE_TOKEN = "with a single token"
NOTHING_TO_PREDICT = "windows of long documents without a token to train on"
NO_PROMPT = "without a prompt"
NO_REPLY = "without a chosen or a rejected reply"
REPLY_TOO_LONG = "whose chosen or rejected text exceeds sequence_len"
NO_STEP = "without a labelled step within sequence_len"
REFERENCE_TOO_LONG = "whose prompt and reference do not fit within sequence_len"
NO_COMPLETION = "without a completion (or with only one of chosen and rejected)"
COMPLETION_TOO_LONG = "whose prompt and completions do not fit within sequence_len"
DROPPED = (
    EMPTY,
    NO_PROMPT,
    NO_REFERENCE,
    PROMPT_TOO_LONG,
    REFERENCE_TOO_LONG,
    NO_COMPLETION,
    COMPLETION_TOO_LONG,
    TOO_LONG,
    TOO_SHORT,
    TAIL,
    ONE_TOKEN,
    NOTHING_TO_PREDICT,
    NO_REPLY,
    REPLY_TOO_LONG,
    NO_STEP,
    REPEATED,
)
# Other counts.
TRUNCATED = "truncated at sequence_len"
SPLIT = "cut into windows of sequence_len"
LEFT_OUT = "with thinking of earlier turns, which the chat template leaves out"
UNTHINKING = (
    "with turns that are trained on without their thinking, which the chat template leaves out of earlier turns; "
    "ebft_strided_chat.transform_all_turns keeps it"
)
NOTES = (SPLIT, TRUNCATED, LEFT_OUT, UNTHINKING)
_left_out: set[str] = set()  # of the rows that were checked since `take_left_out` was called


def note_left_out(what: str) -> None:
    """Note for the row that is being checked that the chat template leaves out LEFT_OUT or UNTHINKING."""
    _left_out.add(what)


def take_left_out() -> str:
    """The note of the report for the rows that were checked since the last call, empty if nothing was left out."""
    found = max(_left_out, key=(LEFT_OUT, UNTHINKING).index, default="")
    _left_out.clear()
    return found


NAMED = 3  # documents that are named per reason


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
        given = ((self.documents, "document"), (self.rows, "row"))
        documents, rows = (f"{number:,} {noun}{'s' * (number != 1)}" for number, noun in given)
        notes, dropped = (
            ", ".join(f"{self.counts[reason]:,} {reason}" for reason in reasons if self.counts.get(reason))
            for reasons in (NOTES, DROPPED)
        )
        noted, ending = f" ({notes})" if notes else "", f"; dropped {dropped}" if dropped else ""
        return f"{self.section}: {documents} produced {rows}{noted}{ending}"

    def with_example(self) -> str:
        """The report as text, with the source and row of a document that was dropped, if there is one."""
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

    def report(self, section: str, documents: int, rows: int, sources: list[tuple[str, int]]) -> SectionReport:
        """The report of a section; `sources` are its sources, with the number of the first document of each."""
        found = {reason: documents for reason, documents in self.documents.items() if self[reason]}
        examples = {reason: [_location(each, sources) for each in some] for reason, some in found.items()}
        return SectionReport(section, documents, rows, {reason: self[reason] for reason in found}, examples)


def _location(document: int, sources: list[tuple[str, int]]) -> str:
    name, first = next((name, first) for name, first in reversed(sources) if first <= document)
    return f"{name}, row {document - first}"
