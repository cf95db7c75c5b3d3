"""Rows of several documents: positions start again, and no document predicts the next one's first token."""

from ebft.data.batches import JoiningCollator, joined

DOCUMENTS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "prompt_length": 1}, {"input_ids": [8, 9]}]


def test_documents_are_joined_by_hand():
    row = joined(DOCUMENTS)
    assert row == {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, 7, -100, 9], "seq_lengths": [3, 2]}


def test_a_packed_row_stays_one_row_of_the_batch():
    batch = JoiningCollator(0)([{"documents": DOCUMENTS}, {"documents": [{"input_ids": [1, 2, 3]}]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9], [-100, 2, 3, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


def test_rows_that_are_not_packed_are_padded_only():
    batch = JoiningCollator(0)([{"input_ids": [5, 6], "labels": [5, 6], "prompt_length": 0}, {"input_ids": [7]}])
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert batch["labels"].tolist() == [[-100, 6], [-100, -100]]
