"""Packing: every row once, none over the limit, the same documents to the trainer."""

import pytest
import torch
from datasets import Dataset

from ebft.data.batches import DocumentCollator, pack_rows
from ebft.errors import DataError
from ebft.strided.layout import Documents


def rows_of(lengths):
    return [{"input_ids": [i + 1] * n, "labels": [i + 1] * n, "prompt_length": i % 3} for i, n in enumerate(lengths)]


@pytest.mark.parametrize("as_dataset", [True, False])
def test_every_row_is_packed_once(as_dataset):
    lengths = [7, 3, 12, 5, 5, 2, 9, 1, 30, 4, 6]
    rows = rows_of(lengths)
    packed = pack_rows(Dataset.from_list(rows).select(range(11)) if as_dataset else rows, 12)
    documents = [row for pack in (packed[i] for i in range(len(packed))) for row in pack["documents"]]
    assert sorted(row["input_ids"][0] for row in documents) == list(range(1, 12))
    totals = [sum(len(row["input_ids"]) for row in packed[i]["documents"]) for i in range(len(packed))]
    assert totals == packed.lengths
    assert sorted(totals) == [6, 12, 12, 12, 12, 30]  # 54 tokens in five rows of at most 12, and one row too long
    assert len(packed[totals.index(30)]["documents"]) == 1


def test_packed_rows_become_the_same_batch():
    rows = rows_of([7, 3, 12, 5])
    packed = pack_rows(rows, 15)
    collate = DocumentCollator(0)
    together = collate([packed[i] for i in range(len(packed))])
    order = [
        packed[i]["documents"][j]["input_ids"][0] - 1
        for i in range(len(packed))
        for j in range(len(packed[i]["documents"]))
    ]
    apart = collate([rows[i] for i in order])
    assert together.keys() == apart.keys() and all(together[k].equal(apart[k]) for k in apart)
    documents = Documents.from_inputs(together)
    assert documents.lengths.tolist() == [len(rows[i]["input_ids"]) for i in order]
    assert len(documents.tokens) == 27


def test_packing_is_deterministic_and_nearly_full():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (3000,), generator=generator).tolist()
    rows = [{"input_ids": range(n)} for n in lengths]
    first, second = pack_rows(rows, 512), pack_rows(rows, 512)
    assert first._packs == second._packs
    assert len(first) <= 1.02 * sum(lengths) / 512


def test_rows_that_come_packed_stay_packed():
    """With position_ids, or with the documents' lengths as TRL packs them; rows beside them are one document each."""
    by_position = {"input_ids": [1, 2, 3, 4, 5], "position_ids": [0, 1, 2, 0, 1]}
    by_length = {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]}
    for row in (by_position, by_length):
        documents = Documents.from_inputs(DocumentCollator(0)([row, {"input_ids": [6, 7, 8, 9, 10, 11]}]))
        assert documents.lengths.tolist() == [3, 2, 6]
        assert documents.tokens.tolist() == list(range(1, 12))
    with pytest.raises(DataError, match="5 input_ids and 4 positions"):
        DocumentCollator(0)([{**by_length, "seq_lengths": [2, 2]}])


def test_completion_mask_is_trl_s():
    batch = DocumentCollator(0)([{"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 1, 1]}])
    assert batch["labels"].tolist() == [[-100, -100, 3, 4]]
    assert Documents.from_inputs(batch).prompt_length.tolist() == [2]
