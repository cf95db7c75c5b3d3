"""Rows of reward models, token by token: one token per byte, and four special ones."""

import json
import warnings

import pytest

from ebft.config.schema import RunConfig
from ebft.data.keys import DatasetEntry
from ebft.data.transforms import reward
from ebft.errors import DataError
from tests.structured.conftest import make_chat_tokenizer

TOKENIZER = make_chat_tokenizer()
CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"


@pytest.fixture
def load(tmp_path):
    """`load(flag, rows, **entry)`: the rows of a reward model, and the report."""

    def load_rows(flag, rows, keys=None, **entry):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kind = "bradley_terry.chat_template" if flag == "reward_model" else "stepwise_supervised"
        with warnings.catch_warnings(action="ignore"):
            config = RunConfig.from_dict(
                {
                    "base_model": "none",
                    "output_dir": "out",
                    flag: True,
                    "datasets": [{"path": str(path), "type": kind, **entry}],
                    "shuffle_merged_datasets": False,
                    **(keys or {}),
                }
            )
        found = config.method.load_rows(config, TOKENIZER)
        return found.train, found.reports[0]

    return load_rows


def texts(rows) -> list[tuple[str, str]]:
    return [tuple(TOKENIZER.decode(row[f"{name}_ids"]) for name in ("chosen", "rejected")) for row in rows]


def test_a_pair_is_two_conversations(load):
    rows, _ = load(
        "reward_model",
        [
            {"system": None, "input": "Hi", "chosen": "Yes", "rejected": "No!"},
            {"system": "Be kind", "input": "Hi", "chosen": "A", "rejected": "B"},
        ],
    )
    system = "<|im_start|>system\nBe kind<|im_end|>\n"
    assert texts(rows) == [
        (CHAT.format("Yes"), CHAT.format("No!")),
        (system + CHAT.format("A"), system + CHAT.format("B")),
    ]
    assert rows.column_names == ["chosen_ids", "rejected_ids"]


def test_lists_of_messages_are_whole_conversations_or_follow_the_prompt(load):
    asked = {"role": "user", "content": "Hi"}
    replies = [{"role": "assistant", "content": text} for text in ("Yes", "No")]
    whole, _ = load("reward_model", [{"chosen": [asked, replies[0]], "rejected": [asked, replies[1]]}])
    parts, _ = load("reward_model", [{"prompt": [asked], "chosen": replies[:1], "rejected": replies[1:]}])
    assert texts(whole) == texts(parts) == [(CHAT.format("Yes"), CHAT.format("No"))]


def test_whole_conversations_that_start_with_the_prompt_do_not_repeat_it(load):
    asked = {"role": "user", "content": "Hi"}
    replies = [{"role": "assistant", "content": text} for text in ("Yes", "No")]
    rows, _ = load("reward_model", [{"prompt": [asked], "chosen": [asked, replies[0]], "rejected": replies[1:]}])
    assert texts(rows) == [(CHAT.format("Yes"), CHAT.format("No"))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": ["Hi", "Yes"], "rejected": ["Ho", "No"]}, "different messages before their last one.*'prompt'"),
        ({"prompt": ["Hi"], "chosen": ["Ho", "Yes"], "rejected": ["Hi", "No"]}, "column 'chosen' starts with .*'user'"),
    ],
)
def test_replies_to_different_questions_are_refused(load, row, message):
    roles = ("user", "assistant")
    chats = {name: [{"role": r, "content": c} for r, c in zip(roles, chat)] for name, chat in row.items()}
    with pytest.raises(DataError, match=f"row 0: .*{message}"):
        load("reward_model", [chats])


def test_margins_are_passed_on(load):
    pair = {"input": "Hi", "chosen": "Yes", "rejected": "No"}
    rows, _ = load("reward_model", [{**pair, "margin": 1.5}, {**pair, "margin": 0}])
    assert rows["margin"][:] == [1.5, 0.0]
    assert "margin" not in load("reward_model", [{**pair, "margin": 0}])[0].column_names


@pytest.mark.parametrize("margin", [None, "1", True, float("inf"), float("nan")])
def test_margins_that_are_no_finite_numbers_are_refused(load, margin):
    pair = {"input": "Hi", "chosen": "Yes", "rejected": "No", "margin": margin}
    with pytest.raises(DataError, match="row 0: margin must be a finite number, got"):
        load("reward_model", [pair])


def test_pairs_without_a_reply_and_long_ones_are_dropped_and_counted(load):
    rows, report = load(
        "reward_model",
        [
            {"input": "Hi", "chosen": "Yes", "rejected": "No"},
            {"input": "Hi", "chosen": "Yes", "rejected": " "},
            {"input": "", "chosen": "Yes", "rejected": "No"},
            {"input": "Hi", "chosen": "Yes", "rejected": "No" * 50},
        ],
        {"sequence_len": 60},
    )
    assert texts(rows) == [(CHAT.format("Yes"), CHAT.format("No"))]
    assert "dropped 2 without a chosen or a rejected reply, 1 whose chosen or rejected text exceeds" in str(report)


def labels(rows) -> list[list[tuple[str, int]]]:
    """Each row as (token, label)."""
    return [list(zip(map(TOKENIZER.decode, row["input_ids"]), row["labels"], strict=True)) for row in rows]


ROW = {"prompt": "Q:", "completions": ["ab", "c"], "labels": [True, False]}


def test_the_last_token_of_each_separator_has_the_class_of_the_step(load):
    rows, _ = load("process_reward_model", [ROW], step_separator="\n\n")
    off = -100
    expected = [("Q", off), (":", off)]  # the tokenizer has no BOS
    expected += [("a", off), ("b", off), ("\n", off), ("\n", 1), ("c", off), ("\n", off), ("\n", 0)]
    assert labels(rows) == [expected]


def test_the_separator_is_a_line_break_by_default(load):
    rows, _ = load("process_reward_model", [{**ROW, "labels": [2, 1]}], {"num_labels": 3})
    assert [label for _, label in labels(rows)[0]] == [-100, -100, -100, -100, 2, -100, 1]


def test_only_the_last_step_has_a_label(load):
    rows, _ = load("process_reward_model", [ROW], train_on_last_step_only=True)
    assert [label for _, label in labels(rows)[0]] == [-100] * 6 + [0]


def test_completions_are_cut_and_rows_without_a_label_are_dropped(load):
    rows, _ = load("process_reward_model", [ROW], max_completion_length=3)
    assert labels(rows) == [[("Q", -100), (":", -100), ("a", -100), ("b", -100), ("\n", 1)]]
    rows, report = load("process_reward_model", [ROW, {**ROW, "prompt": "Q" * 9}], {"sequence_len": 6})
    assert [text for text, _ in labels(rows)[0]] == ["Q", ":", "a", "b", "\n", "c"]
    assert "(1 truncated at sequence_len); dropped 1 without a labelled step within sequence_len" in str(report)


def test_bos_is_before_the_prompt():
    tokenizer = make_chat_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    entry = DatasetEntry(path="none", type="stepwise_supervised")
    row = reward.stepwise_supervised(None, entry)[0](ROW, tokenizer=tokenizer)
    assert [tokenizer.decode(token) for token in row["input_ids"]] == ["<|im_start|>", *"Q:ab\nc\n"]
    assert row["labels"] == [-100, -100, -100, -100, -100, 1, -100, 0]


@pytest.mark.parametrize(
    ("flag", "row", "message"),
    [
        ("reward_model", {"input": "Hi", "chosen": "a"}, "no column with replies: expected rejected"),
        ("reward_model", {"chosen": "a", "rejected": "b"}, "no column with the user message: expected input"),
        (
            "reward_model",
            {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]},
            "column 'chosen' must end with an assistant message",
        ),
        ("process_reward_model", {**ROW, "labels": [True]}, "2 steps in 'completions' and 1 in 'labels'"),
        ("process_reward_model", {**ROW, "labels": [1, 2]}, "the label 2 is not one of the 2 classes 0 to 1"),
        ("process_reward_model", {**ROW, "labels": ["a", "b"]}, "the class of each step"),
        ("process_reward_model", {"prompt": "a", "completions": ["b"]}, "no column with labels"),
    ],
)
def test_wrong_rows_say_what_is_wrong(load, flag, row, message):
    with pytest.raises(DataError, match=message):
        load(flag, [row])


def test_no_rows_left_says_what_to_change(load):
    with pytest.raises(DataError, match="No usable rows are left: provide pairs whose texts have at most"):
        load("reward_model", [{"input": "", "chosen": "a", "rejected": "b"}])


def test_steps_that_are_equal_within_sequence_len_are_repeated(load):
    row = {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]}
    longer = {"prompt": "p", "completions": ["a", "b", "c"], "labels": [True, False, True]}
    keys = {"sequence_len": len("pa\nb\n"), "dataset_exact_deduplication": True}
    rows, report = load("process_reward_model", [row, longer, row], keys)
    assert len(rows) == 1 and "dropped 2 equal to an earlier row" in str(report)
