"""Each format: the prompt and the completions of one row, written out by hand."""

import json

import pytest

from ebft.data.transforms import find_transform
from ebft.errors import DataError
from tests.data.conftest import assistant, user
from tests.preferences.runs import config_of

ASKED, RIGHT, WRONG = user("2 + 2?"), assistant("4"), assistant("5")
TEXTS = {"chosen": "4", "rejected": "5"}
CHATS = {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}
CHATML = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
LLAMA3 = "<|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
STYLES = {
    "chatml": (CHATML, "<|im_end|>", "<|im_start|>system\nBe {brief}.<|im_end|>\n"),
    "llama3": (LLAMA3, "<|eot_id|>", "<|start_header_id|>system<|end_header_id|>\n\nBe {brief}.<|eot_id|>"),
}
LABEL = {"completion": "4", "label": True}
ROWS = [  # the method, the format and a row
    ("dpo", "default", {"instruction": "2 + 2?", "chosen_response": "4", "rejected_response": "5"}),
    ("dpo", "intel", {"question": "2 + 2?", **TEXTS}),
    ("dpo", "icr", {"input": "2 + 2?", **TEXTS}),
    ("dpo", "argilla_chat", CHATS),
    ("dpo", "prompt_pairs", {"prompt": "2 + 2?", **TEXTS}),
    ("dpo", "ultra", {"prompt": "2 + 2?", **CHATS}),
    ("kto", "argilla", {"instruction": "2 + 2?", **LABEL}),
    ("kto", "argilla_chat", {"completion": [ASKED, RIGHT], "label": True}),
    ("kto", "intel", {"question": "2 + 2?", **LABEL}),
    ("kto", "prompt_pairs", {"prompt": "2 + 2?", **LABEL}),
    ("kto", "ultra", {"prompt": "2 + 2?", **LABEL}),
]


@pytest.fixture
def converted(tmp_path):
    """`converted(row, method, **entry)`: what the transform of an entry makes of a row."""

    def convert(row, method="dpo", **entry):
        config = config_of(method, tmp_path, datasets=[{"path": "rows.jsonl", **entry}])
        transform, options = find_transform(config.datasets[0].type)(config, dataset=config.datasets[0])
        assert options == {"remove_columns": "__all__"}
        return transform(row, tokenizer=None)

    return convert


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("method", "name", "row"), ROWS)
def test_formats_of_texts(converted, style, method, name, row):
    prompt, end, system = STYLES[style]
    pair = {"chosen": f"4{end}", "rejected": f"5{end}"}
    replies = pair if method == "dpo" else {"completion": f"4{end}", "label": True}
    assert converted(row, method, type=f"{style}.{name}") == {"prompt": prompt, **replies}
    if name == "intel":
        assert converted({"system": "Be {brief}.", **row}, method, type=f"{style}.{name}")["prompt"] == system + prompt
    if row == ROWS[1][2]:
        row = {**row, "question": " ", "chosen": None}  # empty texts stay empty
        assert converted(row, type=f"{style}.intel") == {"prompt": "", "chosen": "", "rejected": f"5{end}"}


def test_columns_can_be_nested(converted):
    row = {"t": {"q": "2 + 2?", "replies": {**TEXTS, "ok": False}}}
    names = {"field_prompt": "t.q", "field_chosen": "t.replies.chosen", "field_rejected": "t.replies.rejected"}
    assert converted(row, type=names) == {"prompt": "2 + 2?", **TEXTS}
    labelled = {"field_prompt": "t.q", "field_completion": "t.replies.chosen", "field_label": "t.replies.ok"}
    assert converted(row, "kto", type=labelled) == {"prompt": "2 + 2?", "completion": "4", "label": False}
    chats = {"a": {"q": json.dumps([ASKED]), "good": RIGHT, "bad": [WRONG]}}
    names = {"field_messages": "a.q", "field_chosen": "a.good", "field_rejected": "a.bad"}
    expected = {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}
    assert converted(chats, type="chat_template.default", **names) == expected


def test_replies_as_json_text(converted):
    rows = {"messages": [ASKED], "chosen": json.dumps([ASKED, RIGHT]), "rejected": json.dumps(WRONG)}
    expected = {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}
    assert converted(rows, type="chat_template.default") == expected
    for text in ('{"a": 1}', "[1, 2]", "[]", "{not JSON", '["role"]'):  # an answer in JSON is one
        found = converted({**rows, "chosen": text}, type="chat_template.default")
        assert found["chosen"] == [{"role": "assistant", "content": text}]


def test_columns_that_are_named(converted):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "label": 0}
    assert converted(row, type="passthrough") == {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert converted(row, "kto", type="passthrough") == {"prompt": "a", "completion": "d", "label": 0}
    row = {"q": "2 + 2?", "sys": "Be {brief}.", "good": "4 {prompt}", "bad": "", "is_good": True}
    fields = {"field_prompt": "q", "field_system": "sys", "field_chosen": "good", "field_rejected": "bad"}
    formats = {"prompt_format": "{system} Q: {prompt} A:"}
    formats |= {"chosen_format": "{chosen}!", "rejected_format": "{rejected}!"}
    expected = {"prompt": "Be {brief}. Q: 2 + 2? A:", "chosen": "4 {prompt}!", "rejected": ""}
    assert converted(row, type=fields | formats) == expected
    fields = {"field_prompt": "q", "field_completion": "good", "field_label": "is_good"}
    expected = {"prompt": "2 + 2?", "completion": "<4 {prompt}>", "label": True}
    assert converted(row, "kto", type=fields | {"completion_format": "<{completion}>"}) == expected


@pytest.mark.parametrize(("type", "row", "message"), [
    ("chatml.intel", {"prompt": "a", **TEXTS}, "no column with the prompt: expected question, but"),
    ("chat_template.default", {"messages": [ASKED], "chosen": [ASKED, RIGHT, ASKED], "rejected": WRONG},
     "column 'chosen' ends with a message of the role 'user'"),
    ("chat_template.argilla", {**CHATS, "rejected": [user("?"), WRONG]}, "different messages before their last"),
])  # fmt: skip
def test_rows_of_another_shape(converted, type, row, message):
    with pytest.raises(DataError, match=message):
        converted(row, type=type)
