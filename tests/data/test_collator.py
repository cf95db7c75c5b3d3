"""Padding, written out by hand."""

import pytest
import torch

from ebft.data.batches import DocumentCollator

ROWS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "prompt_length": 1},
    {"input_ids": [8], "labels": [8], "prompt_length": 0},
]


def test_pads_on_the_right():
    batch = DocumentCollator(pad_token_id=9)(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert batch["prompt_length"].tolist() == [1, 0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.long}


def test_without_prompt_length_for_plain_models():
    assert set(DocumentCollator(0, with_prompt_length=False)(ROWS)) == {"input_ids", "attention_mask", "labels"}


def test_turns_are_padded_with_zeros():
    rows = [{**ROWS[0], "turn_spans": [[0, 1], [2, 3]]}, {**ROWS[1], "turn_spans": [[0, 1]]}, ROWS[1]]
    batch = DocumentCollator(0)(rows)
    assert batch["turn_spans"].tolist() == [[[0, 1], [2, 3]], [[0, 1], [0, 0]], [[0, 0], [0, 0]]]
    packed = DocumentCollator(0)([{"documents": rows[:2]}, {"documents": rows[2:]}])
    assert all(packed[name].equal(batch[name]) for name in batch)
    assert "turn_spans" not in DocumentCollator(0)([{**row, "turn_spans": []} for row in ROWS])
    assert "turn_spans" not in DocumentCollator(0, with_prompt_length=False)(rows)


def test_rows_with_tokens_only_train_on_every_token():
    batch = DocumentCollator(0)([{"input_ids": [1, 2]}, {"input_ids": [3, 4], "attention_mask": [1, 0]}])
    assert batch["labels"].tolist() == [[1, 2], [3, -100]]
    assert "prompt_length" not in batch


def test_a_row_without_prompt_length_gets_it_from_its_labels():
    rows = [
        {"input_ids": [1, 2, 3, 4], "prompt_length": 2},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [1, 2], "prompt_length": None},
    ]
    assert DocumentCollator(0)(rows)["prompt_length"].tolist() == [2, 1, 0]


def test_rows_whose_fields_differ_in_length_are_named():
    with pytest.raises(ValueError, match="row 1 of a batch has 3 input_ids, 3 attention_mask and 4 labels"):
        DocumentCollator(0)([{"input_ids": [1]}, {"input_ids": [1, 2, 3], "labels": [1, 2, 3, 4]}])
