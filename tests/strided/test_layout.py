"""Anchors, blocks and documents, written out by hand."""

import pytest
import torch

from ebft.anchors import BlockOptions, turn_anchors
from ebft.strided.layout import Documents, StridedLayout, split

OPTIONS = {"stride": 4, "context_length": 3, "generate_max_len": 2, "n_samples_per_prompt": 2,
           "min_completion_prefix": 1}  # fmt: skip


def test_anchors_by_hand():
    ids = torch.arange(1, 14).repeat(4, 1)
    mask = torch.arange(13) < torch.tensor([13, 9, 4, 13])[:, None]
    inputs = {"input_ids": ids, "attention_mask": mask, "prompt_length": torch.tensor([0, 0, 0, 6])}
    documents = Documents.from_inputs(inputs)
    layout = StridedLayout.place(documents, BlockOptions(**OPTIONS))
    # lengths 13, 9, 4, 13: last anchors at most 11, 7, 2, 11
    assert layout.anchors == [[3, 7, 11], [3, 7], [], [7, 11]]
    assert layout.spans == [(0, 13), (13, 22), (22, 26), (26, 39)]
    assert layout.for_users(layout.block_anchors).tolist() == [[3, 7, 11], [3, 7, 0], [0, 0, 0], [7, 11, 0]]
    assert layout.block_mask().tolist() == [[True] * 3, [True, True, False], [False] * 3, [True, True, False]]
    assert layout.num_blocks == 7
    assert layout.reference_index().tolist() == [[3, 4], [7, 8], [11, 12], [16, 17], [20, 21], [33, 34], [37, 38]]
    assert [int(part.sum()) for part in documents.ce_mask.split([13, 9, 4, 13])] == [12, 8, 3, 13 - 6]


def test_anchors_of_turns_by_hand():
    ids = torch.arange(1, 20).repeat(3, 1)
    spans = torch.tensor([[[2, 7], [9, 11], [12, 19]], [[5, 12], [12, 15], [0, 0]], [[0, 0]] * 3])
    inputs = {"input_ids": ids, "turn_spans": spans, "prompt_length": torch.tensor([12, 12, 14])}
    documents = Documents.from_inputs(inputs)
    layout = StridedLayout.place(documents, BlockOptions(**OPTIONS))
    # From 3 to 5 and 13 to 17, but not from 10 to 9; from 6 to 10 and 13 to 13; from 15 to 17.
    assert layout.anchors == [[3, 13, 17], [6, 10, 13], [15]]
    assert layout.block_mask().tolist() == [[True] * 3, [True] * 3, [True, False, False]]
    assert layout.num_blocks == 7
    counted = [sum(own) for own in documents.ce_mask.view(3, 19).int().tolist()]
    assert counted == [5 + 2 + 7, 7 + 3, 5]
    parts = split(documents, layout, 8)
    assert [part.documents.turns.tolist() for part in parts[:2]] == [spans[:1].tolist(), spans[:2].tolist()]
    with pytest.raises(ValueError, match=r"turns \[\[\[17, 18\], \[0, 0\]\]\], first anchors \[18, 3\]"):
        few = {"input_ids": ids[:1], "turn_spans": torch.tensor([[[17, 18], [0, 0]]])}
        StridedLayout.place(Documents.from_inputs(few), BlockOptions(**OPTIONS))


IDS = torch.ones(2, 9, dtype=torch.long)
WRONG_TURNS = [
    ([[[2, 4]]], r"shape \(2, turns, 2\), got \(1, 1, 2\)"),
    ([[[2, 4]], [[2, 10]]], "document 1, .*2, 10.*, must be .* within its 9 tokens"),
    ([[[2, 4], [3, 6]], [[0, 0]] * 2], "document 0, .* in order"),
    ([[[0, 0], [3, 6]], [[0, 0]] * 2], r"document 0, .* followed only by \(0, 0\)"),
    ([[[5, 7], [1, 2]], [[0, 0]] * 2], "document 0, .* in order"),
]
WRONG_MASKS = [([1] * 7 + [2, 2], "only 0 and 1, got 2. .* position_ids"), ([1, 0] + [1] * 7, "gaps"),
               ([0] + [1] * 6 + [0, 1], "gaps")]  # fmt: skip


@pytest.mark.parametrize(("given", "match"), [
    ({"prompt_length": torch.tensor([0, -1])}, "prompt_length must be one value, at least 0, per document"),
    *(({"turn_spans": torch.tensor(spans)}, match) for spans, match in WRONG_TURNS),
    *(({"attention_mask": torch.tensor([[1] * 8 + [0], mask])}, match) for mask, match in WRONG_MASKS),
])  # fmt: skip
def test_wrong_inputs(given, match):
    with pytest.raises(ValueError, match=match):
        Documents.from_inputs({"input_ids": IDS, **given})


def test_first_anchors_and_the_last_that_just_fits():
    options = BlockOptions(4, 8, 2, 2, 5)
    # Text has no prompt to pass.
    assert [turn_anchors(start, 40, 0, options).start for start in (0, 20, 2)] == [8, 25, 8]
    for length, blocks in ((4, 0), (5, 1), (8, 1), (9, 2)):
        documents = Documents.from_inputs({"input_ids": torch.ones(1, length, dtype=torch.long)})
        if blocks:
            assert StridedLayout.place(documents, BlockOptions(**OPTIONS)).num_blocks == blocks
        else:
            with pytest.raises(ValueError, match=r"lengths \[4\], first anchors \[3\], generate_max_len 2"):
                StridedLayout.place(documents, BlockOptions(**OPTIONS))
    ids, mask = torch.ones(3, 9, dtype=torch.long), torch.arange(9) < torch.tensor([4, 0, 6])[:, None]
    documents = Documents.from_inputs({"input_ids": ids.int(), "attention_mask": mask})
    assert documents.lengths.tolist() == [4, 0, 6] and len(documents.tokens) == 10  # a row of padding has no tokens
    assert documents.tokens.dtype == torch.long  # which the noise depends on
    assert StridedLayout.place(documents, BlockOptions(**OPTIONS)).anchors == [[], [], [3]]


def test_documents_from_left_padded_rows_with_masked_labels():
    inputs = {
        "input_ids": torch.tensor([[0, 0, 11, 12, 13, 14], [21, 22, 23, 0, 0, 0]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
        "labels": torch.tensor([[-100, -100, -100, -100, 13, 14], [21, 22, 23, -100, -100, -100]]),
    }
    documents = Documents.from_inputs(inputs)
    assert documents.tokens.tolist() == [11, 12, 13, 14, 21, 22, 23]
    assert documents.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert documents.lengths.tolist() == [4, 3] and documents.prompt_length.tolist() == [2, 0]
    assert documents.ce_mask.int().tolist() == [0, 0, 1, 1, 0, 1, 1]
    turns = Documents.from_inputs({**inputs, "turn_spans": torch.tensor([[[1, 3]], [[0, 0]]])})
    assert turns.ce_mask.int().tolist() == [0, 0, 1, 0, 0, 1, 1]


def test_positions_part_a_row_into_documents():
    inputs = {
        "input_ids": torch.tensor([[11, 12, 13, 21, 22, 0], [31, 32, 33, 34, 41, 42]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]),
        "labels": torch.tensor([[-100, 12, 13, -100, -100, -100], [-100, -100, 33, 34, 41, 42]]),
    }
    documents = Documents.from_inputs(inputs)
    assert documents.lengths.tolist() == [3, 2, 4, 2]
    assert documents.prompt_length.tolist() == [1, 2, 2, 0]
    assert documents.ce_mask.int().tolist() == [0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1]
    given = Documents.from_inputs({**inputs, "prompt_length": torch.tensor([2, 0, 0, 1])})
    assert given.ce_mask.int().tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 1]
    turns = Documents.from_inputs({**inputs, "turn_spans": torch.tensor([[[1, 2]], [[0, 0]], [[3, 4]], [[0, 0]]])})
    assert turns.ce_mask.int().tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert StridedLayout.place(turns, BlockOptions(1, 1, 1, 1)).anchors == [[1], [], [3], [1]]
    with pytest.raises(ValueError, match=r"one value, at least 0, per document, got \[2, 0\]"):
        Documents.from_inputs({**inputs, "prompt_length": torch.tensor([2, 0])})
    inputs["position_ids"][0, 1] = 5
    with pytest.raises(ValueError, match="position_ids must be 0, 1, 2"):
        Documents.from_inputs(inputs)
