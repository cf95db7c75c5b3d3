"""Which rows are kept, cut or dropped, by hand-made lengths."""

import pytest
from datasets import Dataset

from ebft.data.apply import FEATURES
from ebft.data.lengths import (
    EMPTY,
    NO_REFERENCE,
    NOTHING_TO_PREDICT,
    ONE_TOKEN,
    PROMPT_TOO_LONG,
    SPLIT,
    TAIL,
    TOO_LONG,
    TOO_SHORT,
    TRUNCATED,
    cut_and_drop,
    fits_one_block,
    longest_document,
)
from ebft.data.row_counts import RowCounts


def cut(config, *rows):
    """Rows are (length, prompt_length); returns the kept lengths and the counts."""
    table = [
        {
            "input_ids": list(range(length)),
            "labels": [-100] * prompt + list(range(length))[prompt:],
            "prompt_length": prompt,
            "turn_spans": [],
            "document": 0,
        }
        for length, prompt in rows
    ]
    counts = RowCounts()
    rows, too_long = Dataset.from_list(table, features=FEATURES), config.excess_length_strategy
    kept = cut_and_drop(rows, config.sequence_len, config.required_rows.block, counts, too_long)
    return [len(ids) for ids in kept["input_ids"]], {reason: count for reason, count in counts.items() if count}


@pytest.fixture
def config(make_config):
    # A block needs 4 tokens of context (or the prompt and 2 more) and 3 to generate, within 12.
    ebft = {"mode": "strided", "context_length": 4, "generate_max_len": 3, "min_completion_prefix": 2}
    return make_config("unused", sequence_len=12, ebft=ebft)


@pytest.mark.parametrize(
    ("row", "kept", "counts"),
    [
        ((7, 0), [7], {}),
        ((6, 0), [], {TOO_SHORT: 1}),
        ((0, 0), [], {EMPTY: 1}),
        ((12, 0), [12], {}),
        ((20, 0), [12, 8], {SPLIT: 1}),
        ((30, 0), [12, 12], {SPLIT: 1, TAIL: 1}),
        ((10, 5), [10], {}),
        ((9, 5), [], {TOO_SHORT: 1}),
        ((7, 1), [7], {}),
        ((5, 5), [], {NO_REFERENCE: 1}),
        ((20, 7), [12], {TRUNCATED: 1}),
        ((20, 8), [], {PROMPT_TOO_LONG: 1}),
        ((20, 15), [], {PROMPT_TOO_LONG: 1}),
    ],
)
def test_strided_rows(config, row, kept, counts):
    assert cut(config, row) == (kept, counts)


@pytest.mark.parametrize(
    ("row", "kept", "counts"),
    [
        ((2, 0), [2], {}),
        ((1, 0), [], {ONE_TOKEN: 1}),
        ((25, 0), [12, 12], {SPLIT: 1, NOTHING_TO_PREDICT: 1}),
        ((2, 1), [2], {}),
        ((20, 12), [], {PROMPT_TOO_LONG: 1}),
    ],
)
def test_plain_fine_tuning_needs_one_token_to_predict(make_config, row, kept, counts):
    assert cut(make_config("unused", sequence_len=12, rl=None, ebft=None), row) == (kept, counts)


@pytest.mark.parametrize(
    ("labels", "prompt_length", "kept", "counts"),
    [
        ([0, 0, 3, 3, 0, 0, 0, 8, 8], 7, (4, 2), {TRUNCATED: 1}),
        ([0, 3, 0, 4, 0, 0, 0, 8, 8], 7, (4, 3), {TRUNCATED: 1}),
        ([0, 0, 3, 3, 0, 6, 6, 8, 8], 7, (6, 5), {TRUNCATED: 1}),
        ([5, 5, 5, 5, 5, 5, 5, 5, 5], 7, (6, 0), {TRUNCATED: 1}),
        ([0, 0, 3, 3, 4, 8, 8, 8, 8], 5, (6, 5), {TRUNCATED: 1}),
        ([0, 0, 0, 0, 0, 0, 8, 8, 8], 6, None, {PROMPT_TOO_LONG: 1}),
        ([1, 0, 0, 0, 0, 0, 0, 0, 8], 8, None, {PROMPT_TOO_LONG: 1}),
        ([1, 0, 0, 0], 1, None, {NO_REFERENCE: 1}),
        ([0, 0, 0, 8], 3, (4, 3), {}),
    ],
)
def test_earlier_turns_of_a_chat_that_is_cut_are_trained_on(make_config, labels, prompt_length, kept, counts):
    config = make_config("unused", sequence_len=6, rl=None, ebft=None)
    labels = [label or -100 for label in labels]
    row = {"input_ids": [7] * len(labels), "labels": labels, "prompt_length": prompt_length}
    row |= {"turn_spans": [], "document": 0}
    found = RowCounts()
    rows = cut_and_drop(Dataset.from_list([row], features=FEATURES), config.sequence_len, None, found)
    assert {reason: count for reason, count in found.items() if count} == counts
    if kept is None:
        assert len(rows) == 0
    else:
        length, start = kept
        assert rows[0]["labels"] == labels[:length] and rows[0]["prompt_length"] == start
        assert len(rows[0]["input_ids"]) == length


@pytest.mark.parametrize(
    ("strategy", "row", "kept", "counts"),
    [
        ("truncate", (30, 0), [12], {TRUNCATED: 1}),
        ("truncate", (20, 7), [12], {TRUNCATED: 1}),
        ("truncate", (12, 0), [12], {}),
        ("drop", (30, 0), [], {TOO_LONG: 1}),
        ("drop", (13, 7), [], {TOO_LONG: 1}),
        ("drop", (12, 7), [12], {}),
    ],
)
def test_a_strategy_for_long_rows(make_config, strategy, row, kept, counts):
    config = make_config("unused", sequence_len=12, rl=None, ebft=None, excess_length_strategy=strategy)
    assert cut(config, row) == (kept, counts)


def test_rule_is_the_layouts(config):
    from ebft.anchors import first_anchor

    for length in range(1, 14):
        for prompt in range(length):
            room = first_anchor(prompt, 4, 2) + 3 <= length
            row = {"input_ids": [1] * length, "prompt_length": prompt, "turn_spans": []}
            assert fits_one_block(row, config.ebft) == room
            assert fits_one_block({**row, "prompt_length": 0, "turn_spans": [[prompt, length]]}, config.ebft) == room


@pytest.mark.parametrize(
    ("turns", "length", "kept", "counts"),
    [
        ([(1, 7), (9, 12)], 12, (12, 9, [[1, 7], [9, 12]]), {}),  # the second is too short: its anchor is at 11
        ([(1, 6), (8, 12)], 12, None, {TOO_SHORT: 1}),  # anchors at 4 and 10, each with 2 tokens of its turn
        ([(1, 2), (4, 9)], 9, (9, 4, [[1, 2], [4, 9]]), {}),  # an anchor at 6
        ([(1, 7), (9, 20)], 20, (12, 9, [[1, 7], [9, 12]]), {TRUNCATED: 1}),
        ([(1, 8), (10, 12), (14, 20)], 20, (12, 10, [[1, 8], [10, 12]]), {TRUNCATED: 1}),
        ([(1, 8), (14, 20)], 20, (8, 1, [[1, 8]]), {TRUNCATED: 1}),  # not the user's turn at the end
        ([(1, 6), (9, 20)], 20, None, {PROMPT_TOO_LONG: 1}),
        ([(13, 20)], 20, None, {PROMPT_TOO_LONG: 1}),
    ],
)
@pytest.mark.parametrize("mask_thinking", [False, True])
def test_turns_of_strided_rows(config, turns, length, kept, counts, mask_thinking):
    """A row needs a turn with room for a block; turns are cut with the row, and masked ones stay."""
    config.ebft.mask_thinking_ce = mask_thinking
    labels = [7 if any(a <= i < b for a, b in turns) and not mask_thinking else -100 for i in range(length)]
    labels[-1] = 7  # a row without any label has no reference
    row = {"input_ids": [7] * length, "labels": labels, "prompt_length": turns[-1][0], "turn_spans": turns}
    found = RowCounts()
    rows = cut_and_drop(Dataset.from_list([{**row, "document": 0}], features=FEATURES), 12, config.ebft, found)
    assert {reason: count for reason, count in found.items() if count} == counts
    shown = [(len(row["input_ids"]), row["prompt_length"], row["turn_spans"]) for row in rows]
    assert shown == ([] if kept is None else [kept])


def test_windows_of_a_text_that_is_one_turn(config):
    row = {"input_ids": [7] * 20, "labels": [7] * 20, "prompt_length": 0, "turn_spans": [[0, 20]], "document": 0}
    rows = cut_and_drop(Dataset.from_list([row], features=FEATURES), 12, config.ebft, RowCounts())
    assert rows["turn_spans"][:] == [[[0, 12]], [[0, 8]]]


def test_the_longest_document_of_every_kind_of_rows():
    ids = lambda *lengths: [[1] * length for length in lengths]
    tokens = Dataset.from_dict({"input_ids": ids(3, 7, 5)})
    pairs = {"chosen_ids": ids(4, 1), "rejected_ids": ids(2, 9)}
    assert longest_document(tokens, None) == 7
    assert longest_document(tokens, Dataset.from_dict({"input_ids": ids(8)})) == 8
    assert longest_document(Dataset.from_dict(pairs)) == 9
    assert longest_document(Dataset.from_dict({"prompt_ids": ids(6, 2), **pairs})) == 11  # 2 + 9
    labelled = {"prompt_ids": ids(6, 2), "completion_ids": ids(1, 5)}
    assert longest_document(Dataset.from_dict(labelled)) == 11  # KTO scores the first prompt with the second completion


def test_the_longest_document_of_prompts_and_of_streams_is_not_known():
    prompts = Dataset.from_dict({"prompt": ["a"], "ground_truth": ["b"]})
    assert longest_document(prompts) is None and longest_document(iter(())) is None
    assert longest_document(Dataset.from_dict({"input_ids": [[1]]}), prompts) is None
