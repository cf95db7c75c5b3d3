"""Rows of exactly sequence_len tokens: what is in them, and continuing from the position after each."""

from itertools import islice

import pytest
from datasets import Dataset

from ebft.data.stream import SKIPPED, Position, StreamedDocuments, StreamRows, StreamSource
from ebft.errors import DataError

# Documents of consecutive tokens: 1, 2, ... in the first, 11, 12, ... in the second.
LENGTHS = (3, 6, 1, 0, 2)


def stream(length=4, apart=True, seed=None, size=3, lengths=LENGTHS):
    def sources():
        return [StreamSource("rows", Dataset.from_dict({"n": list(range(len(lengths)))}).to_iterable_dataset())]

    encode = lambda document: [10 * document.row["n"] + place + 1 for place in range(lengths[document.row["n"]])]
    return StreamRows(StreamedDocuments(sources, size, seed), encode, length, apart)


def first(rows, number):
    return list(islice(rows.rows(), number))


def test_documents_fill_rows_and_continue_in_the_next_one():
    rows = first(stream(), 3)
    assert [row["input_ids"] for row in rows] == [[1, 2, 3, 11], [12, 13, 14, 15], [16, 41, 42, 1]]
    assert [row["seq_lengths"] for row in rows] == [[3, 1], [4], [1, 2, 1]]
    assert [row["pieces"] for row in rows] == [2, 1, 3]
    labels = [[-100, 2, 3, -100], [-100, 13, 14, 15], [-100, -100, 42, -100]]  # none for the first of a document
    assert [row["labels"] for row in rows] == labels
    passes = [row["input_ids"] for row in first(stream(length=11), 3)]
    assert passes == [[1, 2, 3, *range(11, 17), 41, 42]] * 3  # a document of one token has nothing to predict
    row = first(stream(apart=False), 1)[0]
    assert row["input_ids"] == [1, 2, 3, 11] and row["labels"] == [-100, 2, 3, 11] and "seq_lengths" not in row


@pytest.mark.parametrize("seed", [None, 3])
def test_the_position_after_a_row_gives_the_rows_after_it(seed):
    made = stream(seed=seed)
    rows = first(made, 12)
    for number in range(9):
        position = rows[number]["position"]
        assert position.row == number + 1
        again = list(islice(made.rows(Position(**position.as_json())), 11 - number))
        assert again == rows[number + 1 :]


def test_continuing_skips_to_the_row_and_begins_with_empty_rows():
    made = stream(seed=3)
    rows = first(made, 8)
    made.continue_from(rows[1]["position"], row=4, skipped=3)
    assert list(islice(made, 6)) == [SKIPPED] * 3 + rows[4:7]


def test_a_stream_without_text_ends_with_an_error():
    with pytest.raises(DataError, match="no document of the stream has text to train on"):
        first(stream(lengths=(1, 0)), 1)
