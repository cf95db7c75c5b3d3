"""Streams: blocks of raw rows and rows of exactly sequence_len tokens, and continuing from a position in them."""

import json
from dataclasses import asdict
from itertools import islice

import pytest
from datasets import Dataset, IterableDataset

from ebft.data.stream import SKIPPED, Labelled, Position, StreamedDocuments, StreamRows, StreamSource
from ebft.data.transforms.rows import IGNORE
from ebft.errors import DataError, told


def documents(sizes, size, seed=None, skip=0, weights=None):
    def sources():
        rows = [Dataset.from_dict({"n": list(range(count))}).to_iterable_dataset() for count in sizes]
        return [StreamSource(f"source {number}", each, skip) for number, each in enumerate(rows)]

    return StreamedDocuments(sources, size, seed, weights)


def taken(blocks, number):
    return list(islice(blocks, number))


def places(block):
    """The rows of a block, each as the number of its source and its own, such as 03."""
    return [f"{document.source}{document.row['n']}" for document in block.documents]


@pytest.mark.parametrize(("sizes", "size", "keys", "blocks", "end"), [
    ([3, 2], 2, {}, ["00 01", "02 10", "11", "00 01"], 2),
    ([5], 3, {"skip": 3}, ["03 04", "03 04"], None),  # of each pass
    # A source begins again while the others go on.
    ([2, 9], 6, {"weights": [1, 1]},
     ["00 10 01 11 00 12", "01 13 00 14 01 15", "00 16 01 17 00 18", "01 10 00 11 01 12"], 3),
])  # fmt: skip
def test_sources_are_read_one_after_the_other_or_in_turn(sizes, size, keys, blocks, end):
    found = taken(documents(sizes, size, **keys).blocks(), len(blocks))
    assert [" ".join(places(block)) for block in found] == blocks
    assert end is None or [block.ends_pass for block in found] == [number == end for number in range(len(blocks))]
    if "skip" in keys:
        assert [document.number for document in found[0].documents] == [3, 4]


@pytest.mark.parametrize("read", [0, 2])
def test_a_position_of_another_reader_is_found_by_its_number(read):
    """Releases before this one read JSON files with another reader of datasets."""
    rows = Dataset.from_dict({"n": list(range(4))}).to_iterable_dataset()
    before = StreamSource("source", rows)
    for _ in range(read):
        before.next_row()
    state = before.state()
    state["rows"]["examples_iterable"]["type"] = "RebatchedArrowExamplesIterable"
    source, again = StreamSource("source", rows), StreamSource("source", rows)
    source.restore(state)
    assert source.state()["read"] == read and source.next_row() == (read, {"n": read})
    again.restore(source.state())
    assert again.next_row() == (read + 1, {"n": read + 1})


def test_rows_are_shuffled_within_a_block_and_otherwise_in_each_pass():
    first, second, third = map(places, taken(documents([30], size=20, seed=1).blocks(), 3))
    assert first != sorted(first) and set(first) == {f"0{n}" for n in range(20)}
    assert set(second) == {f"0{n}" for n in range(20, 30)}
    assert sorted(third) == sorted(first) and third != first
    orders = [places(next(documents([30], size=30, seed=seed).blocks())) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("sizes", "size", "weights", "numbers"), [([7, 4], 3, None, range(7)), ([3, 7, 4], 5, [0.5, 3, 1.5], range(8))]
)
def test_a_position_gives_the_same_blocks_again(sizes, size, weights, numbers):
    made = documents(sizes, size, seed=5, weights=weights)
    blocks = taken(made.blocks(), 9)
    shown = lambda blocks: [(places(block), block.ends_pass) for block in blocks]
    for number in numbers:
        start = json.loads(json.dumps(blocks[number].start))
        assert shown(taken(made.blocks(start), 9 - number)) == shown(blocks[number:])


def test_weights_are_the_proportion_of_the_sources_in_every_stretch():
    blocks = taken(documents([100, 100, 100], size=20, weights=[1, 2, 2]).blocks(), 3)
    assert [[int(place[0]) for place in places(block)] for block in blocks] == [[1, 2, 0, 1, 2] * 4] * 3
    assert [int(place[1:]) for block in blocks for place in places(block) if place[0] == "1"] == list(range(24))


def test_no_more_than_a_block_is_read_ahead_and_an_error_names_the_row():
    seen = []

    def rows():
        for value in range(25):
            seen.append(value)
            yield {"n": value}
        raise OSError("the disk is gone")

    blocks = StreamedDocuments(lambda: [StreamSource("rows", IterableDataset.from_generator(rows))], 8, seed=0).blocks()
    taken(blocks, 3)
    assert len(seen) == 24
    with pytest.raises(OSError) as caught:
        next(blocks)
    assert told(caught.value) == "while reading rows after row 25: OSError: the disk is gone"
    with pytest.raises(DataError, match="source 0: there are no rows after skip: 5"):
        next(documents([5], size=3, skip=5).blocks())
    with pytest.raises(DataError, match="no document of the stream has text to train on"):
        next(stream(lengths=(1, 0)).rows())


# Documents of consecutive tokens: 1, 2, ... in the first, 11, 12, ... in the second.
LENGTHS = (3, 6, 1, 0, 2)


def stream(length=4, apart=True, seed=None, size=3, lengths=LENGTHS, whole=False):
    def sources():
        return [StreamSource("rows", Dataset.from_dict({"n": list(range(len(lengths)))}).to_iterable_dataset())]

    def encode(document):
        ids = [10 * document.row["n"] + place + 1 for place in range(lengths[document.row["n"]])]
        return Labelled(ids, [IGNORE] * (len(ids) // 2) + ids[len(ids) // 2 :], True) if whole else Labelled(ids, ids)

    return StreamRows(StreamedDocuments(sources, size, seed), encode, length, apart)


def test_documents_fill_rows_and_continue_in_the_next_one():
    rows = taken(stream().rows(), 3)
    assert [row["input_ids"] for row in rows] == [[1, 2, 3, 11], [12, 13, 14, 15], [16, 41, 42, 1]]
    assert [row["seq_lengths"] for row in rows] == [[3, 1], [4], [1, 2, 1]]
    assert [row["pieces"] for row in rows] == [2, 1, 3]
    labels = [[-100, 2, 3, -100], [-100, 13, 14, 15], [-100, -100, 42, -100]]  # none for the first of a document
    assert [row["labels"] for row in rows] == labels
    passes = [row["input_ids"] for row in taken(stream(length=11).rows(), 3)]
    assert passes == [[1, 2, 3, *range(11, 17), 41, 42]] * 3  # a document of one token has nothing to predict
    row = taken(stream(apart=False).rows(), 1)[0]
    assert row["input_ids"] == [1, 2, 3, 11] and row["labels"] == [-100, 2, 3, 11] and "seq_lengths" not in row


def test_documents_with_prompts_stay_whole():
    rows, second = taken(stream(length=7, lengths=(3, 6, 1, 4), whole=True).rows(), 4), [*range(11, 17)]
    assert [row["input_ids"] for row in rows] == [[1, 2, 3], second, [31, 32, 33, 34, 1, 2, 3], second]
    assert [row["seq_lengths"] for row in rows] == [[3], [6], [4, 3], [6]]
    assert [row["pieces"] for row in rows] == [1, 1, 2, 1]
    assert rows[2]["labels"] == [-100, -100, 33, 34, -100, 2, 3]
    joined = stream(length=7, lengths=(3, 6, 1, 4), whole=True, apart=False)
    assert next(joined.rows())["labels"] == [-100, 2, 3]


@pytest.mark.parametrize("seed, whole", [(None, False), (3, False), (3, True)])
def test_the_position_after_a_row_gives_the_rows_after_it(seed, whole):
    made = stream(seed=seed, whole=whole, length=6 if whole else 4)
    rows = taken(made.rows(), 12)
    for number in range(9):
        position = rows[number]["position"]
        assert position.row == number + 1
        again = taken(made.rows(Position(**asdict(position))), 11 - number)
        assert again == rows[number + 1 :]


def test_continuing_skips_to_the_row_and_begins_with_empty_rows():
    made = stream(seed=3)
    rows = taken(made.rows(), 8)
    made.continue_from(rows[1]["position"], row=4, skipped=3)
    assert taken(made, 6) == [SKIPPED] * 3 + rows[4:7]
