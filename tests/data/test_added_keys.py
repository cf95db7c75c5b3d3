"""Keys that Arrow adds to tool calls are not trained on, and nulls of JSON data are kept."""

import json

import pytest
from datasets import Dataset, Features, List, Value

from ebft.config.keys.data import DatasetEntry
from ebft.data.apply import Source, tokenise
from ebft.data.json_files import with_own_calls, without_added_keys
from ebft.data.sources import read_source
from tests.data.conftest import assistant, config_of, user
from tests.structured.conftest import make_chat_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
)


def chat(**arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [user("Hi"), assistant("", tool_calls=[call])]}


def arguments_of(messages):
    return messages[1]["tool_calls"][0]["function"]["arguments"]


def tool(**parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


CHATS = [chat(city="Oslo", days=3), chat(to="a"), chat(nested={"deep": [{"x": 1}, {"y": 2}]})]


@pytest.fixture
def texts(tmp_path):
    """`texts(rows, "parquet", **entry)`: the rendered rows after they were written in this format."""

    def run(rows, kind, type="chat_template", **entry):
        path = tmp_path / f"rows.{kind}"
        if kind == "parquet":
            Dataset.from_list(rows).to_parquet(path)
        else:
            path.write_text(json.dumps(rows, indent=2) if kind == "json" else "\n".join(map(json.dumps, rows)))
        config, tokenizer = config_of(type, entry, path), make_chat_tokenizer()
        tokenizer.chat_template = TEMPLATE
        found = tokenise(Source(config.datasets[0], read_source(config.datasets[0])), config, tokenizer)
        return [tokenizer.decode(row["input_ids"]) for row in found]

    return run


def test_calls_and_tools_have_the_keys_of_their_row(texts):
    expected = texts(CHATS, "jsonl")
    assert texts(CHATS, "parquet") == expected
    assert '"arguments": {"to": "a"}' in expected[1]
    assert '{"nested": {"deep": [{"x": 1}, {"y": 2}]}}' in expected[2]
    rename = lambda message: {"calls" if key == "tool_calls" else key: value for key, value in message.items()}
    renamed = [{"messages": list(map(rename, row["messages"]))} for row in CHATS]
    names = {"message_property_mappings": {"role": "role", "content": "content", "tool_calls": "calls"}}
    assert texts(renamed, "parquet", **names) == expected
    rows = [CHATS[0] | {"tools": [tool(a=1)]}, CHATS[1] | {"tools": [tool(b=2)]}]
    assert texts(rows, "parquet") == texts(rows, "jsonl")
    nested = [{"messages": row["messages"], "meta": {"id": None, "tools": row["tools"]}} for row in rows]
    assert texts(nested, "parquet", field_tools="meta.tools") == texts(rows, "jsonl")
    as_text = [row | {"tools": json.dumps([tool(a={"default": None})])} for row in CHATS]
    for kind in ("parquet", "jsonl"):
        assert all('{"a": {"default": null}}' in text for text in texts(as_text, kind))


def test_transforms_of_batches_get_no_added_keys(texts, own):
    type = own("""
def transform(cfg, **kwargs):
    def transform_fn(batch, tokenizer=None):
        texts = [str(messages[1]["tool_calls"][0]["function"]["arguments"]) for messages in batch["messages"]]
        ids = [tokenizer(text)["input_ids"] for text in texts]
        return {"input_ids": ids, "labels": ids}

    return transform_fn, {"batched": True, "remove_columns": "__all__"}
""")
    assert texts(CHATS, "parquet", type) == [str(arguments_of(row["messages"])) for row in CHATS]


@pytest.mark.parametrize("others", [[], [chat(to="a")], [chat(a=1)]], ids=["alone", "other keys", "the same keys"])
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_values_of_json_are_those_of_the_file(texts, kind, others):
    arguments = {"a": None, "b": {"c": [None, 0.1234567890123456, 2**70]}, "d": [1, 2.5], "e": "12", "f": [], "g": {}}
    arguments["day"] = [{"at": "2024-01-02T10:00:00"}, {"at": "2024-01-02"}]  # which the library makes dates
    parameters = {"x": {"default": None, "const": None}, "y": {"enum": ["1", None, 1]}}
    text = texts([chat(**arguments) | {"tools": [tool(**parameters)]}, *others], kind)[0]
    assert f'"arguments": {json.dumps(arguments)}' in text and f'"parameters": {json.dumps(parameters)}' in text


def test_json_next_to_parquet(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(chat(a=None)))
    Dataset.from_list([chat(b=1), chat(c=2)]).to_parquet(tmp_path / "b.parquet")
    found = read_source(DatasetEntry(path=str(tmp_path), type="chat_template"))["messages"]
    assert list(map(arguments_of, found)) == [{"a": None}, {"b": 1}, {"c": 2}]


def test_other_columns_keep_their_keys():
    features = Features({"a": {"x": Value("int64"), "y": Value("int64")}, "b": List({"z": Value("string")})})
    row = {"a": {"x": 1, "y": None}, "b": [{"z": None}]}
    assert without_added_keys(features, "tools")(row) == row


def test_tool_calls_of_arrow_tables_have_their_own_keys():
    rows = Dataset.from_list([{"prompt": row["messages"], "n": 1} for row in CHATS])
    assert arguments_of(rows[1]["prompt"])["city"] is None
    found = with_own_calls({"a": rows, "b": None})
    assert [row["prompt"][1]["tool_calls"] for row in found["a"]] == [row["messages"][1]["tool_calls"] for row in CHATS]
    assert found["a"].features["n"] == Value("int64") and found["b"] is None
