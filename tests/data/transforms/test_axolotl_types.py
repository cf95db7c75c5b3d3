"""Fields of the transforms of pairs, segments and tools that configs of axolotl name."""

import pytest

from ebft.data.prompts import load_prompts
from ebft.errors import ConfigError, DataError
from tests.data.conftest import assistant, config_of, tokenised, user


@pytest.fixture
def texts(tokenizer, chatml):
    """`texts(type, row)`: prompt and completion of a row for SFT, as text without the first token; the last is EOS."""

    def run(type, row, entry=None, chat=False, **keys):
        used = chatml if chat else tokenizer
        (found,) = tokenised(used, type, row, entry=entry, **keys)
        start = found["prompt_length"]
        assert found["labels"] == [-100] * start + found["input_ids"][start:]
        return tuple(used.decode(part) for part in (found["input_ids"][:start], found["input_ids"][start:]))

    return run


BELOW = "<|begin|>Below is an instruction that describes a task"
ALPACA = f"{BELOW}. Write a response that appropriately completes the request."
WITH_INPUT = (
    f"{BELOW}, paired with an input that provides further context. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
)
ALPACA += "\n\n### Instruction:\nAdd.\n\n### Response:\n"
ADD = {"instruction": "Add.", "output": "3"}
ASKED = {"question": "1+2?", "answer": "3"}
SHAREGPT = {"conversations": [{"from": "human", "value": "1+2?"}, {"from": "gpt", "value": "3"}]}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [({"input": "1 2"}, WITH_INPUT), ({"input": ""}, ALPACA), ({"input": None}, ALPACA), ({}, ALPACA)],
)
def test_alpaca(texts, row, prompt):
    assert texts("alpaca", {**ADD, **row}) == (prompt, "3<|end|>")


@pytest.mark.parametrize("type", ["alpaca_chat", "alpaca_chat.load_qa"])
@pytest.mark.parametrize(
    ("row", "question"),
    [(ASKED, "1+2?"), ({**ADD, "input": "1 2"}, "Add.\n\n1 2"), ({**ADD, "input": ""}, "Add.")],
)
def test_alpaca_chat(texts, type, row, question):
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert texts(type, row, chat=True) == (prompt, "3<|im_end|>\n")
    system = "<|im_start|>system\nBe exact.<|im_end|>\n"
    assert texts(type, row, {"system_prompt": "Be exact."}, chat=True)[0] == system + prompt


@pytest.mark.parametrize(
    ("keys", "row", "prompt"),
    [
        ({}, {**ADD, "input": "1 2"}, "Add.\n\n1 2"),
        ({}, ADD, "Add."),
        ({"field_instruction": "q", "field_output": "a"}, {"q": "Add.", "a": "3"}, "Add."),
        (
            {"field_instruction": "t.en", "field_input": "t.i", "field_output": "t.de.x"},
            {"t": {"en": "Add.", "de": {"x": "3"}}},
            "Add.",
        ),
        ({"field_instruction": "t.en", "field_output": "a"}, {"t.en": "Add.", "t": {"en": "no"}, "a": "3"}, "Add."),
        ({"format": "[{instruction}|{input}]"}, {**ADD, "input": "1 2"}, "[Add.|1 2]"),
        ({"format": "[{instruction}|{input}]"}, ADD, "[Add.|]"),
        ({"format": "{input}", "no_input_format": "<{instruction}>"}, ADD, "<Add.>"),
        ({"format": "{{}} {instruction}", "field_input": "none"}, {"instruction": "{x}", "output": "3"}, "{} {x}"),
        ({"system_prompt": "Be exact. "}, ADD, "Be exact. Add."),
        ({"system_prompt": "Be kind. "}, {**ADD, "system": "Go. "}, "Go. Add."),
        ({"field_system": "s", "system_format": "<{system}>"}, {**ADD, "s": "A"}, "<A>Add."),
    ],
)
def test_a_format_of_the_config(texts, keys, row, prompt):
    for type, entry in ((keys, {}), ("user_defined", {"user_defined": keys})):
        assert texts(type, row, entry) == (f"<|begin|>{prompt}", "3<|end|>")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": "{instruct}"}, r"datasets.type.format: '{instruct}' contains the placeholder {instruct}; expected"),
        ({"no_input_format": "{input}"}, r"no_input_format: '{input}' .*expected {instruction}\. Other braces"),
        ({"system_format": "{"}, "system_format: '{' is not a format string"),
        ({"format": "{instruction.x}"}, "contains the placeholder {instruction.x}"),
        ({"field_question": "q"}, "Unknown key 'datasets.0.user_defined.field_question'"),
    ],
)
def test_a_wrong_format(keys, message):
    with pytest.raises(ConfigError, match=message):
        config_of(keys)


@pytest.mark.parametrize(
    ("type", "row", "prompt"),
    [
        ("alpaca", ADD, ALPACA.removeprefix("<|begin|>")),
        ({"format": "{instruction} ="}, {"instruction": "1+2", "output": "3"}, "1+2 ="),
        ("alpaca_chat.load_qa", ASKED, [user("1+2?")]),
        ("sharegpt", SHAREGPT, [user("1+2?")]),
    ],
)
@pytest.mark.parametrize("method", [{"rl": "ebft"}, {"rl": "grpo", "trl": {"reward_funcs": ["own.func"]}}])
@pytest.mark.filterwarnings("ignore:datasets.type")
def test_prompts_of_the_same_rows(write_jsonl, chatml, type, row, prompt, method):
    (found,) = load_prompts(config_of(type, path=write_jsonl([row]), **method), chatml)[0]
    assert found["prompt"] == prompt and found["ground_truth"] == "3"


@pytest.fixture
def segments(tokenizer):
    """`segments([(text, label)])`: the tokens, each with whether it is trained on, and the length of the prompt."""

    def run(segments, **keys):
        row = {"segments": [{"text": text, "label": label} for text, label in segments]}
        (found,) = tokenised(tokenizer, "input_output", row, **keys)
        shown = [(token, label != -100) for token, label in zip(found["input_ids"], found["labels"])]
        return shown, found["prompt_length"]

    return run


def test_segments(segments, tokenizer):
    texts, labels = ("<|begin|>Q: ", "one", " two", "\n", "three<|end|>", "x"), (False, True, True, False, True, False)
    pieces = [(tokenizer(text, add_special_tokens=False)["input_ids"], label) for text, label in zip(texts, labels)]
    shown, prompt_length = segments([(texts[0], False), (None, True), *list(zip(texts, labels))[1:]])
    assert shown == [(token, label) for ids, label in pieces for token in ids]
    assert prompt_length == sum(len(ids) for ids, _ in pieces[:4])
    assert shown[0][0] == tokenizer.bos_token_id and shown[-2][0] == tokenizer.eos_token_id
    shown, prompt_length = segments([("one", True), (" two", True)])  # a text
    assert prompt_length == 0 and all(label for _, label in shown)
    assert all(label for _, label in segments([("one", False), (" two", True)], train_on_inputs=True)[0])
    for given in ([], [("one", False)], [("", True)]):  # no reference
        shown, prompt_length = segments(given)
        assert not any(label for _, label in shown) and (prompt_length == 0 or prompt_length >= len(shown))


@pytest.mark.parametrize(
    ("type", "row", "message"),
    [
        ("input_output", {"segments": ["one"]}, "column 'segments', segment 0: expected {text"),
        ("input_output", {"segments": [{"text": "one", "label": "yes"}]}, "segment 0: expected {text"),
        ("input_output", {"segments": [{"text": 1, "label": True}]}, "segment 0: expected {text: ..., label"),
        ("input_output", {"text": "one"}, "no column with segments.*Set `field`"),
        ("alpaca", ASKED, "no column with the instruction.*mapping as type: {field_instruction"),
    ],
)
def test_wrong_rows(tokenizer, type, row, message):
    with pytest.raises(DataError, match=message):
        tokenised(tokenizer, type, row)


def test_tools_are_passed_to_the_template(texts, chatml):
    chatml.chat_template = "{% if tools %}{{ tools[0].name }}: {% endif %}" + chatml.chat_template.replace(
        "{{ m.content }}", "{{ m.content }}{% for call in m.tool_calls or [] %}CALL {{ call.name }}{% endfor %}"
    )
    row = {"messages": [user("1+2?"), assistant("3")]}
    plain = texts("chat_template", row, chat=True)[0]
    for type in ("chat_template", "ebft_strided_chat", "ebft_strided_chat.transform_last_turn"):
        assert texts(type, row | {"tools": [{"name": "add"}]}, chat=True)[0] == f"add: {plain}"
    calls = {"messages": [user("1+2?"), assistant("", tool_calls=[{"name": "add"}])]}  # a last turn that is trained on
    assert texts("chat_template", calls, chat=True)[1] == "CALL add<|im_end|>\n"
