"""Blocks of raw rows: their order, where they end, and reading them again from a position."""

import json

import pytest
from datasets import Dataset

from ebft.data.stream import Documents, MixedDocuments, Source
from ebft.errors import DataError


def counted(number, seen):
    """Rows 0 to `number` - 1 as a stream; `seen` gets each row when it is read."""

    def rows():
        for value in range(number):
            seen.append(value)
            yield {"n": value}

    from datasets import IterableDataset

    return IterableDataset.from_generator(rows)


def documents(sizes, size, seed=None, skip=0, weights=None):
    def sources():
        made = []
        for number, count in enumerate(sizes):
            rows = Dataset.from_dict({"n": list(range(count))}).to_iterable_dataset()
            made.append(Source(f"source {number}", rows, skip))
        return made

    return Documents(sources, size, seed) if weights is None else MixedDocuments(sources, size, seed, weights)


def taken(blocks, number):
    return [next(blocks) for _ in range(number)]


def places(block):
    return [(document.source, document.row["n"]) for document in block.documents]


def test_sources_are_read_one_after_the_other_and_then_again():
    blocks = taken(documents([3, 2], size=2).blocks(), 4)
    assert [places(block) for block in blocks] == [
        [(0, 0), (0, 1)],
        [(0, 2), (1, 0)],
        [(1, 1)],
        [(0, 0), (0, 1)],
    ]
    assert [block.ends_pass for block in blocks] == [False, False, True, False]


@pytest.mark.parametrize("read", [0, 2])
def test_a_position_of_another_reader_is_found_by_its_number(read):
    """Releases before this one read JSON files with another reader of datasets."""
    rows = Dataset.from_dict({"n": list(range(4))}).to_iterable_dataset()
    before = Source("source", rows)
    for _ in range(read):
        before.next_row()
    state = before.state()
    state["rows"]["examples_iterable"]["type"] = "RebatchedArrowExamplesIterable"
    source = Source("source", rows)
    source.restore(state)
    assert source.state()["read"] == read and source.next_row() == (read, {"n": read})
    again = Source("source", rows)
    again.restore(source.state())
    assert again.next_row() == (read + 1, {"n": read + 1})


def test_rows_are_shuffled_within_a_block_and_otherwise_in_each_pass():
    first, second, third = taken(documents([30], size=20, seed=1).blocks(), 3)
    assert places(first) != sorted(places(first)) and sorted(places(first)) == [(0, n) for n in range(20)]
    assert sorted(places(second)) == [(0, n) for n in range(20, 30)]
    assert sorted(places(third)) == sorted(places(first)) and places(third) != places(first)


def test_the_seed_determines_the_order():
    orders = [places(next(documents([30], size=30, seed=seed).blocks())) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("number", range(7))
def test_a_position_gives_the_same_blocks_again(number):
    made = documents([7, 4], size=3, seed=5)
    blocks = taken(made.blocks(), 9)
    start = json.loads(json.dumps(blocks[number].start))
    again = taken(made.blocks(start), 9 - number)
    assert [places(block) for block in again] == [places(block) for block in blocks[number:]]
    assert [block.ends_pass for block in again] == [block.ends_pass for block in blocks[number:]]


def test_weights_are_the_proportion_of_the_sources_in_every_stretch():
    blocks = taken(documents([100, 100, 100], size=20, weights=[1, 2, 2]).blocks(), 3)
    assert [[source for source, _ in places(block)] for block in blocks] == [[1, 2, 0, 1, 2] * 4] * 3
    assert [row for block in blocks for source, row in places(block) if source == 1] == list(range(24))


def test_a_source_of_a_mixture_begins_again_while_the_others_go_on():
    blocks = taken(documents([2, 9], size=6, weights=[1, 1]).blocks(), 4)
    assert [places(block) for block in blocks] == [
        [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 2)],
        [(0, 1), (1, 3), (0, 0), (1, 4), (0, 1), (1, 5)],
        [(0, 0), (1, 6), (0, 1), (1, 7), (0, 0), (1, 8)],
        [(0, 1), (1, 0), (0, 0), (1, 1), (0, 1), (1, 2)],
    ]
    assert [block.ends_pass for block in blocks] == [False, False, False, True]


@pytest.mark.parametrize("number", range(8))
def test_a_position_in_a_mixture_gives_the_same_blocks_again(number):
    made = documents([3, 7, 4], size=5, seed=5, weights=[0.5, 3, 1.5])
    blocks = taken(made.blocks(), 9)
    start = json.loads(json.dumps(blocks[number].start))
    again = taken(made.blocks(start), 9 - number)
    assert [places(block) for block in again] == [places(block) for block in blocks[number:]]
    assert [block.ends_pass for block in again] == [block.ends_pass for block in blocks[number:]]


def test_a_source_without_rows_in_a_mixture_is_an_error():
    with pytest.raises(DataError, match="source 0: there are no rows after skip: 5"):
        next(documents([5, 7], size=3, skip=5, weights=[1, 1]).blocks())


def test_skip_leaves_out_the_beginning_of_each_pass():
    blocks = taken(documents([5], size=3, skip=3).blocks(), 2)
    assert [places(block) for block in blocks] == [[(0, 3), (0, 4)]] * 2
    assert [document.number for document in blocks[0].documents] == [3, 4]


def test_no_more_than_a_block_is_read_ahead():
    seen = []
    made = Documents(lambda: [Source("rows", counted(10_000, seen))], 8, seed=0)
    taken(made.blocks(), 3)
    assert len(seen) == 24


def test_a_source_without_rows_is_an_error():
    with pytest.raises(DataError, match="source 0: there are no rows after skip: 5"):
        next(documents([5], size=3, skip=5).blocks())


def test_an_unreadable_row_is_named_by_its_source_and_place():
    def rows():
        yield {"n": 0}
        raise OSError("the disk is gone")

    from datasets import IterableDataset

    source = Source("rows.jsonl, train", IterableDataset.from_generator(rows))
    with pytest.raises(DataError, match=r"rows.jsonl, train: cannot be read after row 1 .*the disk is gone"):
        next(Documents(lambda: [source], 8, seed=0).blocks())
