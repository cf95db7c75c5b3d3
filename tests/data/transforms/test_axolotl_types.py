"""Fields of the transforms of pairs, segments and tools that configs of axolotl name."""

import pytest
from datasets import Dataset

from ebft.config.schema import RunConfig
from ebft.data.apply import tokenise
from ebft.data.prompts import load_prompts
from ebft.errors import ConfigError, DataError


def config_of(type, entry=None, path="x", **keys):
    return RunConfig.from_dict(
        {"base_model": "x", "datasets": [{"path": str(path), "type": type, **(entry or {})}], **keys}
    )


@pytest.fixture
def texts(tokenizer, chatml):
    """`texts(type, row)`: prompt and completion of a row for SFT, as text without the first token; the last is EOS."""

    def run(type, row, entry=None, chat=False, **keys):
        config, used = config_of(type, entry, **keys), chatml if chat else tokenizer
        found = tokenise(Dataset.from_list([row]), config.datasets[0], config, used)[0]
        start = found["prompt_length"]
        assert found["labels"] == [-100] * start + found["input_ids"][start:]
        return tuple(used.decode(part) for part in (found["input_ids"][:start], found["input_ids"][start:]))

    return run


ALPACA = (
    "<|begin|>Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\nAdd.\n\n### Response:\n"
)
WITH_INPUT = (
    "<|begin|>Below is an instruction that describes a task, paired with an input that provides further context. Write "
    "a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n"
    "### Response:\n"
)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [({"input": "1 2"}, WITH_INPUT), ({"input": ""}, ALPACA), ({"input": None}, ALPACA), ({}, ALPACA)],
)
def test_alpaca(texts, row, prompt):
    assert texts("alpaca", {"instruction": "Add.", "output": "3", **row}) == (prompt, "3<|end|>")


def test_alpaca_names_the_missing_column(texts):
    with pytest.raises(DataError, match="no column with the instruction.*mapping as type: {field_instruction"):
        texts("alpaca", {"question": "Add.", "answer": "3"})


@pytest.mark.parametrize("type", ["alpaca_chat", "alpaca_chat.load_qa"])
@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"question": "1+2?", "answer": "3"}, "1+2?"),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
        ({"instruction": "Add.", "input": "", "output": "3"}, "Add."),
    ],
)
def test_alpaca_chat(texts, type, row, question):
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert texts(type, row, chat=True) == (prompt, "3<|im_end|>\n")
    system = "<|im_start|>system\nBe exact.<|im_end|>\n"
    assert texts(type, row, {"system_prompt": "Be exact."}, chat=True)[0] == system + prompt


@pytest.mark.parametrize(
    ("keys", "row", "prompt"),
    [
        ({}, {"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
        ({}, {"instruction": "Add.", "output": "3"}, "Add."),
        ({"field_instruction": "q", "field_output": "a"}, {"q": "Add.", "a": "3"}, "Add."),
        ({"format": "[{instruction}|{input}]"}, {"instruction": "Add.", "input": "1 2", "output": "3"}, "[Add.|1 2]"),
        ({"format": "[{instruction}|{input}]"}, {"instruction": "Add.", "output": "3"}, "[Add.|]"),
        ({"format": "{input}", "no_input_format": "<{instruction}>"}, {"instruction": "Add.", "output": "3"}, "<Add.>"),
        ({"format": "{{}} {instruction}", "field_input": "none"}, {"instruction": "{x}", "output": "3"}, "{} {x}"),
        ({"system_prompt": "Be exact. "}, {"instruction": "Add.", "output": "3"}, "Be exact. Add."),
        ({"system_prompt": "Be kind. "}, {"instruction": "Add.", "output": "3", "system": "Go. "}, "Go. Add."),
        ({"field_system": "s", "system_format": "<{system}>"}, {"instruction": "1", "output": "3", "s": "A"}, "<A>1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("written", ["mapping", "key"])
def test_a_format_of_the_config(texts, keys, row, prompt, written):
    type, entry = (keys, {}) if written == "mapping" else ("user_defined", {"user_defined": keys})
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
        ("alpaca", {"instruction": "Add.", "output": "3"}, ALPACA.removeprefix("<|begin|>")),
        ({"format": "{instruction} ="}, {"instruction": "1+2", "output": "3"}, "1+2 ="),
        ("alpaca_chat.load_qa", {"question": "1+2?", "answer": "3"}, [{"role": "user", "content": "1+2?"}]),
        ("sharegpt", {"conversations": [{"from": "human", "value": "1+2?"}, {"from": "gpt", "value": "3"}]},
         [{"role": "user", "content": "1+2?"}]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", [{"rl": "ebft"}, {"rl": "grpo", "trl": {"reward_funcs": ["own.func"]}}])
@pytest.mark.filterwarnings("ignore:datasets.type")
def test_prompts_of_the_same_rows(write_jsonl, chatml, type, row, prompt, method):
    path = write_jsonl([row])
    (found,) = load_prompts(config_of(type, path=path, **method), chatml)[0]
    assert found["prompt"] == prompt and found["ground_truth"] == "3"


@pytest.fixture
def segments(tokenizer):
    def run(segments, **keys):
        config = config_of("input_output", **keys)
        row = {"segments": [{"text": text, "label": label} for text, label in segments]}
        found = tokenise(Dataset.from_list([row]), config.datasets[0], config, tokenizer)[0]
        shown = [(token, label != -100) for token, label in zip(found["input_ids"], found["labels"])]
        return shown, found["prompt_length"]

    return run


def test_segments(segments, tokenizer):
    given = [
        ("<|begin|>Q: ", False),
        ("one", True),
        (" two", True),
        ("\n", False),
        ("three<|end|>", True),
        ("x", False),
    ]
    pieces = [(tokenizer(text, add_special_tokens=False)["input_ids"], label) for text, label in given]
    shown, prompt_length = segments([given[0], (None, True), *given[1:]])
    assert shown == [(token, label) for ids, label in pieces for token in ids]
    assert prompt_length == sum(len(ids) for ids, _ in pieces[:4])
    assert shown[0][0] == tokenizer.bos_token_id and shown[-2][0] == tokenizer.eos_token_id


def test_segments_that_are_all_trained_on_are_a_text(segments):
    shown, prompt_length = segments([("one", True), (" two", True)])
    assert prompt_length == 0 and all(label for _, label in shown)
    assert all(label for _, label in segments([("one", False), (" two", True)], train_on_inputs=True)[0])


@pytest.mark.parametrize("given", [[], [("one", False)], [("", True)]])
def test_segments_without_a_label_are_no_reference(segments, given):
    shown, prompt_length = segments(given)
    assert not any(label for _, label in shown) and (prompt_length == 0 or prompt_length >= len(shown))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"segments": ["one"]}, "column 'segments', segment 0: expected {text"),
        ({"segments": [{"text": "one", "label": "yes"}]}, "segment 0: expected {text"),
        ({"segments": [{"text": 1, "label": True}]}, "segment 0: text must be text, got 1"),
        ({"text": "one"}, "no column with segments.*Set `field`"),
    ],
)
def test_wrong_segments(tokenizer, row, message):
    config = config_of("input_output")
    with pytest.raises(DataError, match=message):
        tokenise(Dataset.from_list([row]), config.datasets[0], config, tokenizer)


def test_tools_are_passed_to_the_template(texts, chatml):
    chatml.chat_template = "{% if tools %}{{ tools[0].name }}: {% endif %}" + chatml.chat_template
    chat = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]
    shown = texts("chat_template", {"messages": chat, "tools": [{"name": "add"}]}, chat=True)[0]
    plain = texts("chat_template", {"messages": chat}, chat=True)[0]
    assert shown == f"add: {plain}"
    row = {"messages": chat, "tools": [{"name": "add"}]}
    assert texts("ebft_strided_chat", row, chat=True)[0] == shown
    assert texts("ebft_strided_chat.transform_last_turn", row, chat=True)[0] == shown  # as in structured mode


def test_a_last_turn_that_only_calls_a_tool_is_trained_on(texts, chatml):
    chatml.chat_template = chatml.chat_template.replace(
        "{{ m.content }}", "{{ m.content }}{% for call in m.tool_calls or [] %}CALL {{ call.name }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}]
    assert texts("chat_template", {"messages": chat}, chat=True)[1] == "CALL add<|im_end|>\n"
