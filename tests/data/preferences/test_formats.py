"""Each format: the prompt and the completions of one row, written out by hand."""

import pytest

from ebft.data.keys import DatasetEntry
from ebft.data.transforms import find_transform
from ebft.errors import ConfigError, DataError
from tests.preferences.runs import config_of

ASKED = {"role": "user", "content": "2 + 2?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))
TEXTS = {"chosen": "4", "rejected": "5"}
CHATS = {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}
CHATML = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
LLAMA3 = "<|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
PAIRS = {  # format -> a row
    "default": {"instruction": "2 + 2?", "chosen_response": "4", "rejected_response": "5"},
    "intel": {"question": "2 + 2?", **TEXTS},
    "icr": {"input": "2 + 2?", **TEXTS},
    "argilla_chat": CHATS,
    "prompt_pairs": {"prompt": "2 + 2?", **TEXTS},
    "ultra": {"prompt": "2 + 2?", **CHATS},
}
LABELLED = {
    "argilla": {"instruction": "2 + 2?", "completion": "4", "label": True},
    "argilla_chat": {"completion": [ASKED, RIGHT], "label": True},
    "intel": {"question": "2 + 2?", "completion": "4", "label": True},
    "prompt_pairs": {"prompt": "2 + 2?", "completion": "4", "label": True},
    "ultra": {"prompt": "2 + 2?", "completion": "4", "label": True},
}


def converted(row, tmp_path, method="dpo", **entry):
    """What the transform of an entry makes of a row."""
    config = config_of(method, tmp_path, datasets=[{"path": "rows.jsonl", **entry}])
    transform, options = find_transform(config.datasets[0].type)(config, dataset=config.datasets[0])
    assert options == {"remove_columns": "__all__"}
    return transform(row, tokenizer=None)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_texts(name, tmp_path):
    for style, prompt, end in (("chatml", CHATML, "<|im_end|>"), ("llama3", LLAMA3, "<|eot_id|>")):
        found = converted(PAIRS[name], tmp_path, type=f"{style}.{name}")
        assert found == {"prompt": prompt, "chosen": f"4{end}", "rejected": f"5{end}"}


@pytest.mark.parametrize("name", LABELLED)
def test_completions_with_a_label(name, tmp_path):
    for style, prompt, end in (("chatml", CHATML, "<|im_end|>"), ("llama3", LLAMA3, "<|eot_id|>")):
        found = converted(LABELLED[name], tmp_path, "kto", type=f"{style}.{name}")
        assert found == {"prompt": prompt, "completion": f"4{end}", "label": True}


def test_a_system_message_comes_first(tmp_path):
    row = {"system": "Be {brief}.", **PAIRS["intel"]}
    assert converted(row, tmp_path, type="chatml.intel")["prompt"] == (
        "<|im_start|>system\nBe {brief}.<|im_end|>\n" + CHATML
    )
    assert converted(row, tmp_path, type="llama3.intel")["prompt"] == (
        "<|start_header_id|>system<|end_header_id|>\n\nBe {brief}.<|eot_id|>" + LLAMA3
    )


def test_messages_with_two_replies(tmp_path):
    expected = {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}
    convert = lambda row, **entry: converted(row, tmp_path, type="chat_template.default", **entry)
    assert convert({"messages": [ASKED], "chosen": RIGHT, "rejected": WRONG}) == expected
    assert convert({"messages": [ASKED], **TEXTS}) == expected
    assert convert({"messages": [ASKED], "chosen": [RIGHT], "rejected": [ASKED, WRONG]}) == expected


@pytest.mark.parametrize("chosen", [[RIGHT, ASKED], [ASKED, RIGHT, ASKED], {**RIGHT, "role": "user"}])
def test_replies_must_end_with_an_answer(chosen, tmp_path):
    row = {"messages": [ASKED], "chosen": chosen, "rejected": WRONG}
    with pytest.raises(DataError, match="column 'chosen' ends with a message of the role 'user'.*role assistant"):
        converted(row, tmp_path, type="chat_template.default")


def test_names_of_columns_and_of_the_keys_of_messages(tmp_path):
    named = lambda message: {"from": message["role"], "value": message["content"], "role": None}
    row = {"talk": [named(ASKED)], "good": named(RIGHT), "bad": [named(WRONG)]}
    entry = {"field_messages": "talk", "field_chosen": "good", "field_rejected": "bad"}
    properties = {"role": "from", "content": "value"}
    found = converted(row, tmp_path, type="chat_template.default", message_property_mappings=properties, **entry)
    assert found == {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}


def test_shapes_of_messages_are_those_of_other_chats(tmp_path):
    """ShareGPT without a mapping, other names of roles, and a system message from a column."""
    row = {
        "messages": [{"from": "customer", "value": ASKED["content"]}],
        "chosen": {"from": "gpt", "value": RIGHT["content"]},
        "rejected": [{"from": "gpt", "value": WRONG["content"]}],
        "rule": "Be brief.",
    }
    roles = {"user": ["customer"], "assistant": ["gpt"]}
    found = converted(row, tmp_path, type="chat_template.default", roles=roles, field_system="rule")
    system = {"role": "system", "content": "Be brief."}
    assert found == {"prompt": [system, ASKED], "chosen": [RIGHT], "rejected": [WRONG]}
    with pytest.raises(ConfigError, match="roles has no effect with type: chatml.intel"):
        converted(row, tmp_path, type="chatml.intel", roles=roles)


@pytest.mark.parametrize("name", ["argilla_chat", "argilla"])
def test_chats_that_differ_in_the_last_message(name, tmp_path):
    convert = lambda row: converted(row, tmp_path, "orpo", type=f"chat_template.{name}")
    assert convert(CHATS) == {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}
    with pytest.raises(DataError, match="different messages before their last one"):
        convert({**CHATS, "rejected": [{**ASKED, "content": "?"}, WRONG]})
    with pytest.raises(DataError, match="column 'chosen' ends with a message of the role 'user'"):
        convert({**CHATS, "chosen": [ASKED]})


def test_passthrough_keeps_the_columns(tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "label": 0}
    assert converted(row, tmp_path, type="passthrough") == {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert converted(row, tmp_path, "kto", type="passthrough") == {"prompt": "a", "completion": "d", "label": 0}


def test_a_mapping_of_columns(tmp_path):
    row = {"q": "2 + 2?", "sys": "Be {brief}.", "good": "4 {prompt}", "bad": "", "is_good": True}
    fields = {
        "field_prompt": "q",
        "field_system": "sys",
        "field_chosen": "good",
        "field_rejected": "bad",
        "prompt_format": "{system} Q: {prompt} A:",
        "chosen_format": "{chosen}!",
        "rejected_format": "{rejected}!",
    }
    expected = {"prompt": "Be {brief}. Q: 2 + 2? A:", "chosen": "4 {prompt}!", "rejected": ""}
    assert converted(row, tmp_path, type=fields) == expected
    fields = {"field_prompt": "q", "field_completion": "good", "field_label": "is_good"}
    fields["completion_format"] = "<{completion}>"
    expected = {"prompt": "2 + 2?", "completion": "<4 {prompt}>", "label": True}
    assert converted(row, tmp_path, "kto", type=fields) == expected


def test_empty_texts_stay_empty(tmp_path):
    row = {"question": " ", "chosen": None, "rejected": "5"}
    expected = {"prompt": "", "chosen": "", "rejected": "5<|im_end|>"}
    assert converted(row, tmp_path, type="chatml.intel") == expected


@pytest.mark.parametrize(
    ("type", "row", "message"),
    [
        ("chatml.intel", {"prompt": "a", **TEXTS}, "the column 'question' is missing: the row has prompt, chosen"),
        ("chatml.default", TEXTS, "the column 'prompt or input or question or instruction' is missing"),
        ("chatml.argilla_chat", {**CHATS, "chosen": [ASKED, RIGHT, ASKED, RIGHT]}, "has 4 messages.*argilla_chat"),
        ("chatml.prompt_pairs", {"prompt": [ASKED], **TEXTS}, "column 'prompt' must contain text, got list"),
        ("chat_template.default", {"messages": "a", **TEXTS}, "column 'messages' must contain a list of messages"),
        ("passthrough", TEXTS, "the column 'prompt' is missing"),
    ],
)
def test_rows_of_another_shape(type, row, message, tmp_path):
    with pytest.raises(DataError, match=message):
        converted(row, tmp_path, type=type)


def test_a_format_without_its_column_is_refused():
    with pytest.raises(ValueError, match=r"chosen_format: 'x' does not contain \{chosen\}"):
        DatasetEntry.model_validate({"path": "x", "type": {"chosen_format": "x"}})
