"""What chat templates leave out of a conversation is an error, or counted in the report."""

from contextlib import nullcontext
from itertools import groupby
from pathlib import Path

import pytest
import trl

from ebft.config.schema import RunConfig
from ebft.data.conversation import is_reply
from ebft.data.load import load_token_rows
from ebft.data.omissions import LEFT_OUT, Omissions
from ebft.data.preferences import load_preference_rows
from ebft.data.prompts import load_prompt_rows
from ebft.data.rendering import ChatTemplate
from ebft.data.reward_rows import load_comparisons
from ebft.data.row_counts import UNTHINKING
from ebft.errors import DataError
from tests.data.conftest import assistant, user
from tests.structured.conftest import make_chat_tokenizer

FOLDER = Path(trl.__file__).parent / "chat_templates"
ASK, SAY = user("w7 Zq"), assistant("w8 Zq")
THINKS = assistant("<think>\nt9 Zq\n</think>\n\nw8 Zq")
KINDS = {
    "thinking": [ASK, THINKS],
    "thinking in two turns": [ASK, THINKS, user("u2 Zq"), assistant("<think>t3 Zq</think>e")],
    "reasoning_content": [ASK, {**SAY, "reasoning_content": "t9 Zq"}],
    "key thinking": [ASK, {**SAY, "thinking": "t9 Zq"}],
    "unknown role": [ASK, {"role": "critic", "content": "c1 Zq"}, SAY],
}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("deepseek_r1_distill", "thinking", "omits the thinking of message 1 .assistant., which is in its content"),
        ("deepseek_r1_distill_training", "thinking", None),
        ("qwen3", "thinking in two turns", None),
        ("qwen2_5", "reasoning_content", "in the key 'reasoning_content'. Set `template_thinking_key: content`"),
        ("qwen2_5", "key thinking", "`template_thinking_key: content` and `field_thinking: thinking` of the dataset"),
        ("qwen3", "key thinking", None),  # passed under the key that the template reads
        ("gptoss", "reasoning_content", None),
        ("qwen2_5", "unknown role", "omits the content of message 1 .critic., .* `roles: {assistant: .critic.}`"),
    ],
)
def test_errors(name, kind, message):
    tokenizer = make_chat_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    with nullcontext() if message is None else pytest.raises(DataError, match=message):
        Omissions(name).check(KINDS[kind], ChatTemplate(tokenizer, name), {1, 3})


PAIR = {"messages": [ASK], "chosen": [THINKS], "rejected": [SAY]}
LABELLED = {"prompt": [ASK], "completion": [THINKS], "label": True}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided", "generate_max_len": 2, "context_length": 2}}
METHODS = {
    "sft": (load_token_rows, {}, "chat_template", {"messages": KINDS["thinking"]}),
    "strided": (load_token_rows, STRIDED, "ebft_strided_chat", {"messages": KINDS["thinking"]}),
    "structured": (load_prompt_rows, {"rl": "ebft"}, "ebft_chat_multiturn", {"messages": KINDS["thinking"]}),
    "dpo": (load_preference_rows, {"rl": "dpo"}, "chat_template.default", PAIR),
    "kto": (load_preference_rows, {"rl": "kto", "micro_batch_size": 2}, "passthrough", LABELLED),
    "reward model": (load_comparisons, {"reward_model": True}, "bradley_terry.chat_template",
                     {"chosen": [ASK, THINKS], "rejected": [ASK, SAY]}),
}  # fmt: skip


@pytest.fixture
def load(write_jsonl):
    """`load(method, template, row)`: the tokenizer, and what is loaded from three copies of a row."""

    def run(method, template, row=None, type=None):
        loader, keys, usual, usual_row = METHODS[method]
        tokenizer = make_chat_tokenizer()
        tokenizer.chat_template = (FOLDER / f"{template}.jinja").read_text()
        entry = {"path": str(write_jsonl([row or usual_row] * 3)), "type": type or usual}
        return tokenizer, loader(
            RunConfig.from_dict({"base_model": "x", "sequence_len": 4096, "datasets": [entry], **keys}), tokenizer
        )

    return run


def test_thinking_of_earlier_turns_is_counted(load, capsys):
    row = {"messages": KINDS["thinking in two turns"]}
    assert load("sft", "qwen3", row)[1].reports[0].counts == {UNTHINKING: 3}
    assert f"produced 3 rows (3 {UNTHINKING})" in capsys.readouterr().err
    _, rows = load("sft", "qwen3", row, "ebft_strided_chat.transform_all_turns")
    assert rows.reports[0].counts == {LEFT_OUT: 3} and len(rows.train) == 6


TALK = "<|im_start|>user\nw7 Zq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("method", METHODS)
def test_the_role_developer(load, method):
    told = [{"role": "developer", "content": "d1 Zq"}, ASK]
    rows = {
        "dpo": {**PAIR, "messages": told},
        "kto": {**LABELLED, "prompt": told},
        "reward model": {"chosen": [*told, THINKS], "rejected": [*told, SAY]},
    }
    with pytest.warns(UserWarning, match="does not render the role developer; .* as system messages"):
        tokenizer, found = load(method, "qwen3", rows.get(method, {"messages": [*told, SAY]}))
    row = found.train[0]
    text = "<|im_start|>system\nd1 Zq<|im_end|>\n" + TALK
    if method == "structured":
        assert row["prompt"] == [{**told[0], "role": "system"}, ASK]
    else:
        names = ("input_ids", "prompt_ids", "chosen_ids")
        assert tokenizer.decode(next(row[name] for name in names if name in row)).startswith(text)


def test_tools_of_sharegpt(load):
    said = [("human", "w7 Zq"), ("function_call", '{"name": "f", "arguments": {"a": null}}'), ("observation", "5")]
    row = {"conversations": [{"from": role, "value": text} for role, text in [*said, ("gpt", "w8 Zq")]]}
    tokenizer, rows = load("sft", "qwen3_instruct_2507", row)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": null}}\n</tool_call><|im_end|>\n'
    result = "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
    text = tokenizer.decode(rows.train[0]["input_ids"])
    assert text.startswith(TALK + call + result) and text.endswith("w8 Zq<|im_end|>\n")


@pytest.mark.parametrize(
    ("method", "weights", "expected"),
    [
        ("sft", (None, None), ["w8 Zq<|im_end|>\n", "w9 Zq<|im_end|>\n"]),
        ("sft", (0, 1), ["w9 Zq<|im_end|>\n"]),
        ("sft", (1.0, 0.0), ["w8 Zq<|im_end|>\n"]),
        ("strided", (1, 0), ["w8 Zq<|im_end|>\n"]),
        ("structured", (None, None), ["w8 Zq", "w9 Zq"]),
        ("structured", (0, 1), ["w9 Zq"]),
        ("structured", (1, 0), ["w8 Zq"]),
    ],
)
def test_a_message_with_weight_0_is_context(load, method, weights, expected):
    later = [user("u2 Zq"), assistant("w9 Zq", weight=weights[1])]
    tokenizer, rows = load(method, "qwen2_5", {"messages": [ASK, {**SAY, "weight": weights[0]}, *later]})
    found = rows.train[0]
    if method == "structured":
        turns = found.get("remaining_turns") or []
        assert [found["ground_truth"], *(turn["content"] for turn in turns if is_reply(turn))] == expected
        assert [message["content"] for message in [*found["prompt"], *turns]].count("w8 Zq") == (weights[0] == 0)
        return
    groups = [list(group) for learns, group in groupby(found["labels"], key=lambda label: label != -100) if learns]
    assert [tokenizer.decode(group) for group in groups] == expected


def test_other_weights_of_messages(load):
    with pytest.raises(DataError, match=r"weight of a message \(assistant\) must be 0 .* or 1, got 0.5"):
        load("sft", "qwen2_5", {"messages": [ASK, {**SAY, "weight": 0.5}]})
