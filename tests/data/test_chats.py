"""Chats of any shape as messages with role and content."""

import pytest

from ebft.data.keys import DatasetEntry
from ebft.data.messages import chat_of, tools_of
from ebft.errors import DataError

PLAIN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def entry(**keys):
    return DatasetEntry.model_validate({"path": "x", "type": "chat_template", **keys})


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"messages": PLAIN}, {}),
        ({"conversations": PLAIN}, {}),
        ({"messages": SHAREGPT}, {}),
        ({"conversations": SHAREGPT}, {}),
        ({"conversations": SHAREGPT}, {"type": "sharegpt"}),
        ({"talk": SHAREGPT}, {"field_messages": "talk"}),
        ({"talk": {"turns": PLAIN}}, {"field_messages": "talk.turns"}),
        ({"messages": [{"r": "user", "t": "Hi"}, {"r": "assistant", "t": "Hello"}]},
         {"message_property_mappings": {"role": "r", "content": "t"}}),
        ({"messages": [{"r": "user", "t": "Hi"}, {"r": "assistant", "t": "Hello"}]},
         {"message_field_role": "r", "message_field_content": "t"}),
        ({"messages": [{"r": "user", "t": "Hi"}, {"r": "assistant", "t": "Hello"}]},
         {"message_field_role": "r", "message_property_mappings": {"content": "t"}}),
        ({"messages": [{"role": "customer", "content": "Hi"}, {"role": "bot", "content": "Hello"}]},
         {"roles": {"user": ["customer"], "assistant": ["bot", "agent"]}}),
        ({"messages": [PLAIN[0], {"role": "model", "content": "Hello"}]}, {}),
        ({"messages": [{**PLAIN[0], "extra": None}, {**PLAIN[1], "extra": None}]}, {}),
    ],
)  # fmt: skip
def test_shapes(row, keys):
    assert chat_of(row, entry(**keys)) == PLAIN


def test_other_keys_of_messages_are_kept_and_renamed():
    chat = [{"from": "human", "value": "Hi", "person": "Ada", "weight": 0}]
    mapping = {"role": "from", "content": "value", "name": "person"}
    found = chat_of({"messages": chat}, entry(message_property_mappings=mapping))
    assert found == [{"role": "user", "content": "Hi", "name": "Ada", "weight": 0}]


def test_a_role_that_is_named_differently_replaces_the_usual_one():
    found = chat_of({"messages": SHAREGPT}, entry(roles={"tool": ["gpt"]}))
    assert [message["role"] for message in found] == ["user", "tool"]


def test_thinking_in_the_content():
    chat = [PLAIN[0], {**PLAIN[1], "reasoning": "hm"}]
    found = chat_of({"messages": chat}, entry(field_thinking="reasoning", template_thinking_key="content"))
    assert found == [PLAIN[0], {**PLAIN[1], "content": "<think>\nhm\n</think>\n\nHello"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [("Hello", "message 0 has the role 'function_call', but its content is not the JSON text of a call"),
     ("[1]", "message 0 has the role 'function_call', so its content must be JSON text with the keys name")],
)  # fmt: skip
def test_calls_of_sharegpt_that_are_none(content, message):
    with pytest.raises(DataError, match=message):
        chat_of({"messages": [{"from": "function_call", "value": content}]}, entry())


def test_a_mapping_that_does_not_fit():
    wrong = entry(message_property_mappings={"role": "speaker", "content": "value"})
    with pytest.raises(DataError, match="message 0 has no key 'speaker'.*message_property_mappings.role; it has from"):
        chat_of({"messages": SHAREGPT}, wrong)


@pytest.mark.parametrize("row", [{"text": "Hi"}, {"talk": PLAIN}])
def test_no_chat(row):
    with pytest.raises(DataError, match="no column with messages: expected messages, conversations, .*field_messages"):
        chat_of(row, entry())


SYSTEM = {"role": "system", "content": "Be brief"}


@pytest.mark.parametrize(
    ("chat", "keys", "system"),
    [
        (PLAIN, {}, None),
        ([SYSTEM, *PLAIN], {}, "Be brief"),
        ([SYSTEM, *PLAIN], {"drop_system_message": True}, None),
        (PLAIN, {"system_prompt": "Be kind"}, "Be kind"),
        ([SYSTEM, *PLAIN], {"system_prompt": "Be kind"}, "Be brief"),
        ([SYSTEM, *PLAIN], {"system_prompt": "Be kind", "drop_system_message": True}, "Be kind"),
        (PLAIN, {"field_system": "rules"}, "Be exact"),
        ([SYSTEM, *PLAIN], {"field_system": "rules", "drop_system_message": True}, "Be exact"),
        (PLAIN, {"field_system": "empty", "system_prompt": "Be kind"}, "Be kind"),
    ],
)
def test_system_messages(chat, keys, system):
    found = chat_of({"messages": chat, "rules": "Be exact", "empty": None}, entry(**keys))
    assert found == ([{"role": "system", "content": system}] if system else []) + PLAIN


@pytest.mark.parametrize(
    ("chat", "column", "keys", "system"),
    [
        (PLAIN, "Be exact", {}, "Be exact"),
        (PLAIN, "Be exact", {"system_prompt": "Be kind"}, "Be exact"),
        (PLAIN, None, {"system_prompt": "Be kind"}, "Be kind"),
        (PLAIN, " ", {}, None),
        ([SYSTEM, *PLAIN], "Be exact", {}, "Be brief"),
        (PLAIN, "Be exact", {"drop_system_message": True}, None),
        (PLAIN, "Be exact", {"field_system": "rules"}, "Be fair"),
    ],
)
def test_the_column_of_system_messages_that_is_not_named(chat, column, keys, system):
    found = chat_of({"messages": chat, "system": column, "rules": "Be fair"}, entry(**keys))
    assert found == ([{"role": "system", "content": system}] if system else []) + PLAIN


def test_a_column_of_this_name_that_is_not_text():
    with pytest.raises(DataError, match="column 'system' must contain text, got int"):
        chat_of({"messages": PLAIN, "system": 3}, entry())
    assert chat_of({"messages": [], "system": "Be exact"}, entry()) == []


def test_two_system_messages_are_refused():
    with pytest.raises(DataError, match="column 'rules' has another one. Set drop_system_message: true"):
        chat_of({"messages": [SYSTEM, *PLAIN], "rules": "Be exact"}, entry(field_system="rules"))


def test_thinking_is_passed_on_under_the_key_of_the_template():
    chat = [PLAIN[0], {**PLAIN[1], "thoughts": "hm"}]
    found = chat_of({"messages": chat}, entry(field_thinking="thoughts", template_thinking_key="thinking"))
    assert found == [PLAIN[0], {**PLAIN[1], "thinking": "hm"}]


def test_thinking_is_split_from_the_content():
    chat = [
        {"role": "user", "content": "<think>x</think>Hi"},
        {"role": "assistant", "content": "<think>hm</think>Hello"},
    ]
    assert chat_of({"messages": chat}, entry()) == chat
    found = chat_of({"messages": chat}, entry(split_thinking=True))
    assert found == [chat[0], {**PLAIN[1], "reasoning_content": "hm"}]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize(
    ("row", "tools"),
    [
        ({}, None),
        ({"tools": None}, None),
        ({"tools": []}, None),
        ({"tools": [TOOL]}, [TOOL]),
        ({"tools": [{**TOOL, "strict": None}]}, [{**TOOL, "strict": None}]),
        ({"tools": '[{"type": "function"}]'}, [{"type": "function"}]),
    ],
)
def test_tools(row, tools):
    assert tools_of(row, entry()) == tools
    assert tools_of({"mine": row.get("tools")}, entry(field_tools="mine")) == tools


@pytest.mark.parametrize(
    ("value", "message"), [("{", "is not valid JSON"), ('"add"', "a list of tool"), ([1], "a list")]
)
def test_what_is_not_tools(value, message):
    with pytest.raises(DataError, match=rf"column 'tools' \(field_tools\) .*{message}"):
        tools_of({"tools": value}, entry())
