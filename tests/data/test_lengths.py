"""Which rows are kept, cut or dropped, by hand-made lengths."""

import pytest
from datasets import Dataset

from ebft.data.apply import FEATURES
from ebft.data.documents import cut_and_drop, longest_document
from ebft.data.row_counts import RowCounts
from tests.data.space_tokenizers import space_tokenizer

NO_ROOM = "whose prompt leaves no room within sequence_len"
NOTHING = "windows of long documents without a token to train on"
TAIL = "ends of long documents too short for one block"
SPLIT = "cut into windows of sequence_len"
TRUNCATED = "truncated at sequence_len"


def row_of(labels, prompt, turns=()):
    return {"input_ids": [7] * len(labels), "labels": labels, "prompt_length": prompt, "turn_spans": turns}


TOKENIZER = space_tokenizer("first")


def cut(config, row):
    """The rows that are left of a row, and the counts."""
    counts = RowCounts()
    rows = Dataset.from_list([{**row, "document": 0}], features=FEATURES)
    kept = cut_and_drop(rows, config, TOKENIZER, counts)
    return list(kept), {reason: count for reason, count in counts.items() if count}


@pytest.fixture
def config(make_config):
    # A block needs 4 tokens of context (or the prompt and 2 more) and 3 to generate, within 12.
    ebft = {"mode": "strided", "context_length": 4, "generate_max_len": 3, "min_completion_prefix": 2}
    return make_config("unused", sequence_len=12, ebft=ebft)


@pytest.mark.parametrize(("strategy", "length", "prompt", "kept", "counts"), [
    ("strided", 7, 0, [7], {}),
    ("strided", 6, 0, [], {"too short for one block": 1}),
    ("strided", 0, 0, [], {"without text": 1}),
    ("strided", 20, 0, [12, 8], {SPLIT: 1}),
    ("strided", 30, 0, [12, 12], {SPLIT: 1, TAIL: 1}),
    ("strided", 9, 5, [], {"too short for one block": 1}),
    ("strided", 5, 5, [], {"without a reference": 1}),
    ("strided", 20, 7, [12], {TRUNCATED: 1}),
    ("strided", 20, 8, [], {NO_ROOM: 1}),
    (None, 2, 0, [2], {}),  # plain fine-tuning needs one token to predict
    (None, 1, 0, [], {"with a single token": 1}),
    (None, 25, 0, [12, 12], {SPLIT: 1, NOTHING: 1}),
    (None, 20, 12, [], {NO_ROOM: 1}),
    ("truncate", 30, 0, [12], {TRUNCATED: 1}),
    ("drop", 30, 0, [], {"longer than sequence_len": 1}),
    ("minimum", 11, 0, [], {"shorter than min_sample_len": 1}), ("minimum", 12, 0, [12], {}),
])  # fmt: skip
def test_lengths(config, make_config, strategy, length, prompt, kept, counts):
    if strategy != "strided":
        keys = {"min_sample_len": 12} if strategy == "minimum" else {"excess_length_strategy": strategy}
        config = make_config("unused", sequence_len=12, rl=None, ebft=None, **keys)
    rows, found = cut(config, row_of([-100] * prompt + [7] * (length - prompt), prompt, [[prompt, length]]))
    assert ([len(row["input_ids"]) for row in rows], found) == (kept, counts)
    assert [row["turn_spans"] for row in rows] == [[[prompt, size]] for size in kept]


@pytest.mark.parametrize(("labels", "prompt_length", "kept", "counts"), [
    ([0, 0, 3, 3, 0, 0, 0, 8, 8], 7, (4, 2), {TRUNCATED: 1}),
    ([0, 3, 0, 4, 0, 0, 0, 8, 8], 7, (4, 3), {TRUNCATED: 1}),
    ([0, 0, 3, 3, 0, 6, 6, 8, 8], 7, (6, 5), {TRUNCATED: 1}),
    ([0, 0, 0, 0, 0, 0, 8, 8, 8], 6, None, {NO_ROOM: 1}),
    ([1, 0, 0, 0], 1, None, {"without a reference": 1}),
    ([0, 0, 0, 8], 3, (4, 3), {}),
])  # fmt: skip
def test_earlier_turns_of_a_chat_that_is_cut_are_trained_on(make_config, labels, prompt_length, kept, counts):
    labels = [label or -100 for label in labels]
    rows, found = cut(make_config("unused", sequence_len=6, rl=None, ebft=None), row_of(labels, prompt_length))
    assert found == counts and len(rows) == (kept is not None)
    for row in rows:
        length, start = kept
        assert (row["labels"], row["prompt_length"], len(row["input_ids"])) == (labels[:length], start, length)


@pytest.mark.parametrize(("turns", "length", "kept", "counts"), [
    ([(1, 7), (9, 12)], 12, (12, 9, [[1, 7], [9, 12]]), {}),  # the second is too short: its anchor is at 11
    ([(1, 6), (8, 12)], 12, None, {"too short for one block": 1}),  # anchors at 4 and 10, 2 tokens before the end
    ([(1, 2), (4, 9)], 9, (9, 4, [[1, 2], [4, 9]]), {}),  # an anchor at 6
    ([(1, 7), (9, 20)], 20, (12, 9, [[1, 7], [9, 12]]), {TRUNCATED: 1}),
    ([(1, 8), (14, 20)], 20, (8, 1, [[1, 8]]), {TRUNCATED: 1}),  # not the user's turn at the end
    ([(1, 6), (9, 20)], 20, None, {NO_ROOM: 1}),
])  # fmt: skip
@pytest.mark.parametrize("mask_thinking", [False, True])
def test_turns_of_strided_rows(config, turns, length, kept, counts, mask_thinking):
    """A row needs a turn with room for a block; turns are cut with the row, and masked ones stay."""
    config.ebft.mask_thinking_ce = mask_thinking
    labels = [7 if any(a <= i < b for a, b in turns) and not mask_thinking else -100 for i in range(length)]
    labels[-1] = 7  # a row without any label has no reference
    rows, found = cut(config, row_of(labels, turns[-1][0], turns))
    shown = [(len(row["input_ids"]), row["prompt_length"], row["turn_spans"]) for row in rows]
    assert found == counts and shown == ([] if kept is None else [kept])


def test_the_longest_document():
    ids = lambda *lengths: [[1] * length for length in lengths]
    table = lambda **columns: Dataset.from_dict(columns)
    tokens = table(input_ids=ids(3, 7, 5))
    pairs = {"chosen_ids": ids(4, 1), "rejected_ids": ids(2, 9)}
    assert longest_document(tokens, None) == 7 and longest_document(tokens, table(input_ids=ids(8))) == 8
    assert longest_document(table(**pairs)) == 9
    assert longest_document(table(prompt_ids=ids(6, 2), **pairs)) == 11  # 2 + 9
    # KTO scores the first prompt with the second completion.
    assert longest_document(table(prompt_ids=ids(6, 2), completion_ids=ids(1, 5))) == 11
    prompts = table(prompt=["a"], ground_truth=["b"])  # not known, as for streams
    assert longest_document(prompts) is longest_document(iter(())) is longest_document(tokens, prompts) is None
