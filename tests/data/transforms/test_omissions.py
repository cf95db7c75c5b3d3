"""Every text of a conversation is in the rendering of a chat template, or in an error or the report."""

import re
import warnings
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path

import pytest
import trl

from ebft.config.schema import RunConfig
from ebft.data.conversation import is_reply
from ebft.data.load import load_token_rows
from ebft.data.omissions import LEFT_OUT, UNTHINKING, Omissions, take_left_out
from ebft.data.preferences import load_preference_rows
from ebft.data.prompts import load_prompt_rows
from ebft.data.rendering import ChatTemplate
from ebft.data.reward_rows import load_comparisons
from ebft.errors import DataError
from tests.structured.conftest import make_chat_tokenizer

FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
ASK, SAY = {"role": "user", "content": "w7 Zq"}, {"role": "assistant", "content": "w8 Zq"}
CALL = {"type": "function", "function": {"name": "nameZq", "arguments": {"keyZq": "valueZq", "n": None}}}
SECOND = {"type": "function", "function": {"name": "otherZq", "arguments": {"k2Zq": 17}}}
THINKS = {"role": "assistant", "content": "<think>\nt9 Zq\n</think>\n\nw8 Zq"}
KINDS = {
    "plain": [{"role": "system", "content": "s1 Zq"}, ASK, SAY],
    "thinking": [ASK, THINKS],
    "thinking in two turns": [ASK, THINKS, {**ASK, "content": "u2 Zq"}, {**THINKS, "content": "<think>t3 Zq</think>e"}],
    "reasoning_content": [ASK, {**SAY, "reasoning_content": "t9 Zq"}],
    "key thinking": [ASK, {**SAY, "thinking": "t9 Zq"}],
    "calls": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "r5 Zq"},
        SAY,
    ],
    "two calls": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL, SECOND]}],
    "text and call": [ASK, {**SAY, "tool_calls": [CALL]}],
    "developer": [{"role": "developer", "content": "d1 Zq"}, ASK, SAY],
    "unknown role": [ASK, {"role": "critic", "content": "c1 Zq"}, SAY],
    "short": [{**ASK, "content": "a"}, {**SAY, "content": "e"}, {**ASK, "content": "a"}, {**SAY, "content": "e"}],
}


def words(value):
    """All texts of a conversation that contain Zq, without tags of thinking."""
    if isinstance(value, dict):
        return [word for key, item in value.items() for word in words(key) + words(item)]
    if isinstance(value, list):
        return [word for item in value for word in words(item)]
    return [part.strip() for part in re.split("</?think>", str(value)) if "Zq" in part]


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost_in_silence(name):
    assert not [problem for kind in KINDS for problem in silent(template_of(name), name, kind)]


def silent(template, name, kind):
    """What is lost without an error, a warning or a count; or reported, but not lost."""
    omissions, error = Omissions(name), ""
    take_left_out()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        messages = omissions.with_known_roles(KINDS[kind], template)
        try:
            text = template(messages)
            omissions.check(messages, template, {i for i, m in enumerate(messages) if m["role"] == "assistant"}, text)
        except DataError as found:
            error = str(found)
    if error and "omits" not in error:
        return []  # the template refuses the conversation
    lost = [word for word in words(messages) if word not in text]
    beside_call = any("leaves out the text" in str(warning.message) for warning in warned)
    is_right = bool(lost) == bool(error or take_left_out() or beside_call) or kind == "short"
    return [] if is_right else [(kind, lost, error)]


def template_of(name):
    tokenizer = make_chat_tokenizer()
    tokenizer.bos_token = tokenizer.bos_token or "<|im_start|>"
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return ChatTemplate(tokenizer, name)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("deepseek_r1_distill", "thinking", "omits the thinking of message 1 .assistant., which is in its content"),
        ("deepseek_r1_distill_training", "thinking", None),
        ("qwen3", "thinking in two turns", None),
        ("qwen2_5", "reasoning_content", "in the key 'reasoning_content'. Set `template_thinking_key: content`"),
        (
            "qwen2_5",
            "key thinking",
            "Set `template_thinking_key: content` and `field_thinking: thinking` of the dataset to",
        ),
        ("qwen3", "key thinking", None),  # passed under the key that the template reads
        ("gptoss", "reasoning_content", None),
        ("qwen2_5", "unknown role", "omits the content of message 1 .critic., .* `roles: {assistant: .critic.}`"),
    ],
)
def test_errors(name, kind, message):
    check = lambda: Omissions(name).check(KINDS[kind], template_of(name), {1, 3})
    with nullcontext() if message is None else pytest.raises(DataError, match=message):
        check()


@pytest.fixture
def load(write_jsonl):
    """`load(loader, template, row, **config)`: the training rows of some copies of a row, and the reports."""

    def run(loader, template, row, **config):
        tokenizer = make_chat_tokenizer()
        tokenizer.chat_template = (FOLDER / f"{template}.jinja").read_text()
        entry = {"path": str(write_jsonl([row] * 3)), **config.pop("entry")}
        config = {"base_model": "x", "sequence_len": 4096, "datasets": [entry], "val_set_size": 0, **config}
        return tokenizer, loader(RunConfig.from_dict(config), tokenizer)

    return run


CHAT, PAIR = {"messages": KINDS["thinking"]}, {"messages": [ASK], "chosen": [THINKS], "rejected": [SAY]}
METHODS = {
    "sft": (load_token_rows, {"entry": {"type": "chat_template"}}, CHAT),
    "strided": (
        load_token_rows,
        {
            "rl": "ebft",
            "ebft": {"mode": "strided", "generate_max_len": 2, "context_length": 2},
            "entry": {"type": "ebft_strided_chat"},
        },
        CHAT,
    ),
    "structured": (load_prompt_rows, {"rl": "ebft", "entry": {"type": "ebft_chat_multiturn"}}, CHAT),
    "dpo": (load_preference_rows, {"rl": "dpo", "entry": {"type": "chat_template.default"}}, PAIR),
    "orpo": (load_preference_rows, {"rl": "orpo", "entry": {"type": "chat_template.default"}}, PAIR),
    "kto": (
        load_preference_rows,
        {"rl": "kto", "micro_batch_size": 2, "entry": {"type": "passthrough"}},
        {"prompt": [ASK], "completion": [THINKS], "label": True},
    ),
    "reward model": (
        load_comparisons,
        {"reward_model": True, "entry": {"type": "bradley_terry.chat_template"}},
        {"chosen": [ASK, THINKS], "rejected": [ASK, SAY]},
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_reports_thinking_that_the_template_drops(load, method):
    loader, config, row = METHODS[method]
    with pytest.raises(DataError, match="row 0: .*omits the thinking of message 1"):
        load(loader, "deepseek_r1_distill", row, **{**config, "entry": {**config["entry"]}})
    load(loader, "qwen3", row, **{**config, "entry": {**config["entry"]}})


def test_thinking_of_earlier_turns_is_counted(load, capsys):
    row = {"messages": KINDS["thinking in two turns"]}
    _, rows = load(load_token_rows, "qwen3", row, entry={"type": "chat_template"})
    assert rows.reports[0].counts == {UNTHINKING: 3}
    assert f"produced 3 rows (3 {UNTHINKING})" in capsys.readouterr().err
    _, rows = load(load_token_rows, "qwen3", row, entry={"type": "ebft_strided_chat.transform_all_turns"})
    assert rows.reports[0].counts == {LEFT_OUT: 3} and len(rows.train) == 6


TALK = "<|im_start|>user\nw7 Zq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("method", ["sft", "strided", "dpo"])
def test_the_role_developer(load, method):
    loader, config, _ = METHODS[method]
    told = {"role": "developer", "content": "d1 Zq"}
    row = {"messages": [told, ASK, SAY]} if method != "dpo" else {**PAIR, "messages": [told, ASK]}
    ids = "prompt_ids" if method == "dpo" else "input_ids"
    with pytest.warns(UserWarning, match="does not render the role developer; .* as system messages"):
        tokenizer, rows = load(loader, "qwen3", row, **{**config, "entry": {**config["entry"]}})
    text = tokenizer.decode(rows.train[0][ids])
    assert text.startswith("<|im_start|>system\nd1 Zq<|im_end|>\n" + TALK)


def test_tools_of_sharegpt(load):
    said = [("human", "w7 Zq"), ("function_call", '{"name": "f", "arguments": {"a": null}}'), ("observation", "5")]
    row = {"conversations": [{"from": role, "value": text} for role, text in [*said, ("gpt", "w8 Zq")]]}
    tokenizer, rows = load(load_token_rows, "qwen3_instruct_2507", row, entry={"type": "chat_template"})
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
    loader, config, _ = METHODS[method]
    later = [{**ASK, "content": "u2 Zq"}, {**SAY, "content": "w9 Zq", "weight": weights[1]}]
    row = {"messages": [ASK, {**SAY, "weight": weights[0]}, *later]}
    tokenizer, rows = load(loader, "qwen2_5", row, **{**config, "entry": {**config["entry"]}})
    if method == "structured":
        found = rows.train[0]
        turns = found.get("remaining_turns") or []
        assert [found["ground_truth"], *(turn["content"] for turn in turns if is_reply(turn))] == expected
        assert [message["content"] for message in [*found["prompt"], *turns]].count("w8 Zq") == (weights[0] == 0)
        return
    labels = rows.train[0]["labels"]
    groups = [list(group) for learns, group in groupby(labels, key=lambda label: label != -100) if learns]
    assert [tokenizer.decode(group) for group in groups] == expected


def test_other_weights_of_messages(load):
    with pytest.raises(DataError, match=r"weight of a message \(assistant\) must be 0 .* or 1, got 0.5"):
        load(load_token_rows, "qwen2_5", {"messages": [ASK, {**SAY, "weight": 0.5}]}, entry={"type": "chat_template"})


def test_parts_that_are_not_text(load):
    parts = [{"type": "text", "text": "w7 Zq"}, {"type": "image", "url": "cat.png"}]
    row = {"messages": [{"role": "user", "content": parts}, SAY]}
    with pytest.raises(DataError, match=r"row 0: .*content of message 0 \(user\) has a part of type 'image'"):
        load(load_token_rows, "llama3_1", row, entry={"type": "chat_template"})
