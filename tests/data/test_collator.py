"""Rows as batches, written out by hand: padded, several documents as rows of a batch or as one row, and packed."""

import pytest
import torch
from datasets import Dataset

from ebft.data.documents import DocumentCollator, JoiningCollator, joined, pack_rows
from ebft.errors import DataError
from ebft.strided.layout import Documents

ROWS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "prompt_length": 1},
        {"input_ids": [8], "labels": [8], "prompt_length": 0}]  # fmt: skip


def lists(batch):
    return {name: tensor.tolist() for name, tensor in batch.items()}


def test_rows_are_padded_on_the_right():
    """A token of a row that is also the padding, such as an end of turn, is trained on."""
    batch = DocumentCollator(pad_token_id=7)(ROWS)
    assert {tensor.dtype for tensor in batch.values()} == {torch.long}
    ids, mask, labels = [[5, 6, 7], [8, 7, 7]], [[1, 1, 1], [1, 0, 0]], [[-100, 6, 7], [8, -100, -100]]
    expected = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    assert lists(batch) == {**expected, "prompt_length": [1, 0]}
    assert lists(DocumentCollator(7, with_prompt_length=False)(ROWS)) == expected  # for plain models


def test_turns_are_padded_with_zeros():
    rows = [{**ROWS[0], "turn_spans": [[0, 1], [2, 3]]}, {**ROWS[1], "turn_spans": [[0, 1]]}, ROWS[1]]
    batch = DocumentCollator(0)(rows)
    assert batch["turn_spans"].tolist() == [[[0, 1], [2, 3]], [[0, 1], [0, 0]], [[0, 0], [0, 0]]]
    packed = DocumentCollator(0)([{"documents": rows[:2]}, {"documents": rows[2:]}])
    assert all(packed[name].equal(batch[name]) for name in batch)
    assert "turn_spans" not in DocumentCollator(0)([{**row, "turn_spans": []} for row in ROWS])
    assert "turn_spans" not in DocumentCollator(0, with_prompt_length=False)(rows)


def test_fields_that_rows_do_not_have():
    """Every token is trained on; the length of the prompt is that of the labels; a completion mask is TRL's."""
    batch = DocumentCollator(0)([{"input_ids": [1, 2]}, {"input_ids": [3, 4], "attention_mask": [1, 0]}])
    assert batch["labels"].tolist() == [[1, 2], [3, -100]] and "prompt_length" not in batch
    lengths = {"input_ids": [1, 2, 3, 4], "prompt_length": 2}, {"input_ids": [1, 2], "prompt_length": None}
    batch = DocumentCollator(0)([lengths[0], {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, lengths[1]])
    assert batch["prompt_length"].tolist() == [2, 1, 0]
    batch = DocumentCollator(0)([{"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 0.5, 1]}])
    assert batch["labels"].tolist() == [[-100, -100, 3, 4]]
    masks = {"completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 0, 1]}
    assert DocumentCollator(0)([{"input_ids": [1, 2, 3, 4], **masks}])["labels"].tolist() == [[-100, -100, -100, 4]]
    assert Documents.from_inputs(batch).prompt_length.tolist() == [2]
    turns = {"input_ids": [*range(9)], "assistant_masks": [0, 1, 1, 0, 0, 1, 1, 1, 0]}
    padded = {**turns, "attention_mask": [0, 1, 1, 1, 1, 1, 1, 1, 1]}
    packed = {**turns, "seq_lengths": [2, 7]}
    batch = DocumentCollator(0)([turns, padded])
    assert batch["turn_spans"].tolist() == [[[1, 3], [5, 8]], [[0, 2], [4, 7]]]
    found = Documents.from_inputs(DocumentCollator(0)([packed]))
    assert found.turns.tolist() == [[[1, 2], [0, 0]], [[0, 1], [3, 6]]]
    labels = {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, -100, 4]}
    with pytest.warns(UserWarning, match="masked labels between others and no turn_spans"):
        assert "turn_spans" not in DocumentCollator(0)([labels])
    DocumentCollator(0)([{**labels, "turn_spans": [[1, 4]]}, {**labels, "seq_lengths": [2, 2]}])  # without a warning
    with pytest.raises(ValueError, match="row 1 of a batch has 3 input_ids, 3 attention_mask, 4 labels"):
        DocumentCollator(0)([{"input_ids": [1]}, {"input_ids": [1, 2, 3], "labels": [1, 2, 3, 4]}])


DOCUMENTS = [ROWS[0], {"input_ids": [8, 9]}]


def test_joined_documents():
    """Positions start again, and no document predicts the next one's first token."""
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, 7, -100, 9], "seq_lengths": [3, 2]}
    assert joined(DOCUMENTS) == row
    batch = JoiningCollator(0)([{"documents": DOCUMENTS}, {"documents": [{"input_ids": [1, 2, 3]}]}])
    assert lists(batch) == {
        "input_ids": [[5, 6, 7, 8, 9], [1, 2, 3, 0, 0]], "position_ids": [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]],
        "labels": [[-100, 6, 7, -100, 9], [-100, 2, 3, -100, -100]], "attention_mask": [[1] * 5, [1, 1, 1, 0, 0]],
    }  # fmt: skip
    batch = JoiningCollator(0)([{"input_ids": [5, 6], "labels": [5, 6], "prompt_length": 0}, {"input_ids": [7]}])
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert batch["labels"].tolist() == [[-100, 6], [-100, -100]]


def rows_of(lengths):
    return [{"input_ids": [i + 1] * n, "labels": [i + 1] * n, "prompt_length": i % 3} for i, n in enumerate(lengths)]


def packs(packed):
    return [packed[i]["documents"] for i in range(len(packed))]


def test_every_row_is_packed_once_and_the_batch_is_the_same():
    rows = rows_of([7, 3, 12, 5, 5, 2, 9, 1, 30, 4, 6])
    packed = pack_rows(Dataset.from_list(rows).select(range(11)), 12)
    assert sorted(row["input_ids"][0] for pack in packs(packed) for row in pack) == list(range(1, 12))
    assert packed.lengths == pack_rows(rows, 12).lengths and sorted(packed.lengths) == [6, 12, 12, 12, 12, 30]
    rows, collate = rows_of([7, 3, 12, 5]), DocumentCollator(0)
    packed = pack_rows(rows, 15)
    together = collate([packed[i] for i in range(len(packed))])
    order = [row["input_ids"][0] - 1 for pack in packs(packed) for row in pack]
    apart = collate([rows[i] for i in order])
    assert together.keys() == apart.keys() and all(together[k].equal(apart[k]) for k in apart)
    documents = Documents.from_inputs(together)
    assert documents.lengths.tolist() == [len(rows[i]["input_ids"]) for i in order] and len(documents.tokens) == 27


def test_rows_that_come_packed_stay_packed():
    """With position_ids, or with the documents' lengths as TRL packs them; rows beside them are one document each."""
    ids = {"input_ids": [1, 2, 3, 4, 5]}
    for row in ({**ids, "position_ids": [0, 1, 2, 0, 1]}, {**ids, "seq_lengths": [3, 2]}):
        documents = Documents.from_inputs(DocumentCollator(0)([row, {"input_ids": [6, 7, 8, 9, 10, 11]}]))
        assert documents.lengths.tolist() == [3, 2, 6] and documents.tokens.tolist() == list(range(1, 12))
    with pytest.raises(DataError, match="5 input_ids, .* 4 position_ids"):
        DocumentCollator(0)([{**ids, "seq_lengths": [2, 2]}])
