"""Rows of reward models, token by token: one token per byte, and four special ones."""

import warnings

import pytest

from ebft.errors import DataError
from tests.data.conftest import assistant, config_of, user
from tests.structured.conftest import make_chat_tokenizer

TOKENIZER = make_chat_tokenizer()
CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
PAIR, ROW = "reward_model", "process_reward_model"  # the kinds of reward models
TYPES = {PAIR: "bradley_terry.chat_template", ROW: "stepwise_supervised"}
ASKED, YES, NO = user("Hi"), assistant("Yes"), assistant("No")
TEXTS = {"input": "Hi", "chosen": "Yes", "rejected": "No"}
STEPS = {"prompt": "Q:", "completions": ["ab", "c"], "labels": [True, False]}


@pytest.fixture
def load(write_jsonl):
    """`load(kind, *rows, keys={}, **entry)`: the rows of a reward model, and the report."""

    def load_rows(kind, *rows, keys=None, **entry):
        keys = {"output_dir": "out", kind: True, "shuffle_merged_datasets": False, **(keys or {})}
        with warnings.catch_warnings(action="ignore"):
            config = config_of(TYPES[kind], entry, write_jsonl(rows), **keys)
        found = config.method.load_rows(config, TOKENIZER)
        return found.train, str(found.reports[0])

    return load_rows


def texts(rows) -> list[tuple[str, str]]:
    return [tuple(TOKENIZER.decode(row[f"{name}_ids"]) for name in ("chosen", "rejected")) for row in rows]


def test_system_messages_and_margins(load):
    rows, _ = load(PAIR, {**TEXTS, "system": "Be kind", "margin": 1.5}, {**TEXTS, "margin": 0})
    system = "<|im_start|>system\nBe kind<|im_end|>\n"
    plain = (CHAT.format("Yes"), CHAT.format("No"))
    assert texts(rows) == [tuple(system + text for text in plain), plain] and rows["margin"][:] == [1.5, 0.0]
    assert "margin" not in load(PAIR, {**TEXTS, "margin": 0})[0].column_names


def test_pairs_without_a_reply_and_long_ones_are_dropped_and_counted(load):
    others = ({**TEXTS, "rejected": " "}, {**TEXTS, "input": ""}, {**TEXTS, "rejected": "No" * 50})
    rows, report = load(PAIR, TEXTS, *others, keys={"sequence_len": 60})
    assert texts(rows) == [(CHAT.format("Yes"), CHAT.format("No"))]
    reasons = "1 without a prompt, 1 without a chosen or a rejected reply, 1 whose chosen or rejected text exceeds"
    assert f"dropped {reasons}" in report


def labelled(row):
    """The tokens and the labels of a row; . is none."""
    assert len(row["input_ids"]) == len(row["labels"])
    labels = "".join("." if label == -100 else str(label) for label in row["labels"])
    return "".join(map(TOKENIZER.decode, row["input_ids"])), labels


@pytest.mark.parametrize(("row", "keys", "entry", "text", "labels"), [
    (STEPS, {}, {"step_separator": "\n\n"}, "Q:ab\n\nc\n\n", ".....1..0"),  # the tokenizer has no BOS
    ({**STEPS, "labels": [2, 1]}, {"num_labels": 3}, {}, "Q:ab\nc\n", "....2.1"),
    (STEPS, {}, {"train_on_last_step_only": True}, "Q:ab\nc\n", "......0"),
    (STEPS, {}, {"max_completion_length": 3}, "Q:ab\n", "....1"),
    (STEPS, {"sequence_len": 6}, {}, "Q:ab\nc", "....1."),
])  # fmt: skip
def test_the_last_token_of_each_separator_has_the_class_of_the_step(load, row, keys, entry, text, labels):
    rows, report = load(ROW, row, {**row, "prompt": "Q" * 9}, keys=keys, **entry)
    assert labelled(rows[0]) == (text, labels)
    if "sequence_len" in keys:
        assert "(1 truncated at sequence_len); dropped 1 without a labelled step within sequence_len" in report


def test_bos_is_before_the_prompt(load, monkeypatch):
    tokenizer = make_chat_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    monkeypatch.setattr("tests.data.test_reward_rows.TOKENIZER", tokenizer)
    assert labelled(load(ROW, STEPS)[0][0]) == ("<|im_start|>Q:ab\nc\n", ".....1.0")


@pytest.mark.parametrize(("kind", "row", "message"), [
    (PAIR, {"prompt": [ASKED], "chosen": [user("Ho"), YES], "rejected": [ASKED, NO]},
     "row 0: .*column 'chosen' starts with .*'user'"),
    (PAIR, {**TEXTS, "margin": float("nan")}, "row 0: margin must be a finite number, got"),
    (ROW, {**STEPS, "labels": [True]}, "must be lists of equal length"),
    (ROW, {**STEPS, "labels": [1, 2]}, "labels contains 2, which is not one of 2 tokens or classes"),
])  # fmt: skip
def test_wrong_rows_say_what_is_wrong(load, kind, row, message):
    with pytest.raises(DataError, match=message):
        load(kind, row)
