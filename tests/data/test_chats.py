"""Chats of any shape as messages with role and content."""

import pytest

from ebft.data.keys import DatasetEntry
from ebft.data.messages import chat_of, tools_of
from ebft.errors import DataError
from tests.data.conftest import assistant, user

PLAIN = [user("Hi"), assistant("Hello")]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
SHORT = [{"r": "user", "t": "Hi"}, {"r": "assistant", "t": "Hello"}]
OTHER_ROLES = [{"role": "customer", "content": "Hi"}, {"role": "bot", "content": "Hello"}]
PERSON = {"from": "human", "value": "Hi", "person": "Ada", "weight": 0}
NAMES = {"role": "from", "content": "value", "name": "person"}
TAGGED = [user("<think>x</think>Hi"), assistant("<think>hm</think>Hello")]


def entry(**keys):
    return DatasetEntry.model_validate({"path": "x", "type": "chat_template", **keys})


@pytest.mark.parametrize(
    ("row", "keys", "expected"),
    [
        ({"messages": PLAIN}, {}, PLAIN),
        ({"conversations": PLAIN}, {}, PLAIN),
        ({"messages": SHAREGPT}, {}, PLAIN),
        ({"conversations": SHAREGPT}, {}, PLAIN),
        ({"conversations": SHAREGPT}, {"type": "sharegpt"}, PLAIN),
        ({"talk": SHAREGPT}, {"field_messages": "talk"}, PLAIN),
        ({"talk": {"turns": PLAIN}}, {"field_messages": "talk.turns"}, PLAIN),
        ({"messages": SHORT}, {"message_property_mappings": {"role": "r", "content": "t"}}, PLAIN),
        ({"messages": SHORT}, {"message_field_role": "r", "message_field_content": "t"}, PLAIN),
        ({"messages": SHORT}, {"message_field_role": "r", "message_property_mappings": {"content": "t"}}, PLAIN),
        ({"messages": OTHER_ROLES}, {"roles": {"user": ["customer"], "assistant": ["bot", "agent"]}}, PLAIN),
        ({"messages": [PLAIN[0], {"role": "model", "content": "Hello"}]}, {}, PLAIN),
        ({"messages": [{**message, "extra": None} for message in PLAIN]}, {}, PLAIN),
        ({"messages": [PERSON]}, {"message_property_mappings": NAMES}, [user("Hi", name="Ada", weight=0)]),
        ({"messages": SHAREGPT}, {"roles": {"tool": ["gpt"]}}, [PLAIN[0], {"role": "tool", "content": "Hello"}]),
        ({"messages": [assistant("Hello", reasoning="hm")]},
         {"field_thinking": "reasoning", "template_thinking_key": "content"},
         [assistant("<think>\nhm\n</think>\n\nHello")]),
        ({"messages": [assistant("Hello", thoughts="hm")]},
         {"field_thinking": "thoughts", "template_thinking_key": "thinking"}, [assistant("Hello", thinking="hm")]),
        ({"messages": TAGGED}, {}, TAGGED),
        ({"messages": TAGGED}, {"split_thinking": True}, [TAGGED[0], assistant("Hello", reasoning_content="hm")]),
        ({"messages": [], "system": "Be exact"}, {}, []),
    ],
)  # fmt: skip
def test_shapes(row, keys, expected):
    assert chat_of(row, entry(**keys)) == expected


SYSTEM = {"role": "system", "content": "Be brief"}


@pytest.mark.parametrize(
    ("column", "chat", "keys", "system"),
    [
        (None, PLAIN, {}, None),
        (None, [SYSTEM, *PLAIN], {}, "Be brief"),
        (None, [SYSTEM, *PLAIN], {"drop_system_message": True}, None),
        (None, PLAIN, {"system_prompt": "Be kind"}, "Be kind"),
        (None, [SYSTEM, *PLAIN], {"system_prompt": "Be kind"}, "Be brief"),
        (None, [SYSTEM, *PLAIN], {"system_prompt": "Be kind", "drop_system_message": True}, "Be kind"),
        (None, PLAIN, {"field_system": "rules"}, "Be fair"),
        (None, [SYSTEM, *PLAIN], {"field_system": "rules", "drop_system_message": True}, "Be fair"),
        (None, PLAIN, {"field_system": "empty", "system_prompt": "Be kind"}, "Be kind"),
        ("Be exact", PLAIN, {}, "Be exact"),
        ("Be exact", PLAIN, {"system_prompt": "Be kind"}, "Be exact"),
        (" ", PLAIN, {}, None),
        ("Be exact", [SYSTEM, *PLAIN], {}, "Be brief"),
        ("Be exact", PLAIN, {"drop_system_message": True}, None),
        ("Be exact", PLAIN, {"field_system": "rules"}, "Be fair"),
    ],
)
def test_system_messages(column, chat, keys, system):
    for others in ({"system": column}, *([{}] if column is None else [])):
        found = chat_of({"messages": chat, "rules": "Be fair", "empty": None, **others}, entry(**keys))
        assert found == ([{"role": "system", "content": system}] if system else []) + PLAIN


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


MISFIT = {"message_property_mappings": {"role": "speaker", "content": "value"}}
NO_COLUMN = "no column with messages: expected messages, conversations, .*field_messages"
CALL = "message 0 has the role 'function_call', "


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"messages": [{"from": "function_call", "value": "Hello"}]}, {},
         f"{CALL}but its content is not the JSON text of a call"),
        ({"messages": [{"from": "function_call", "value": "[1]"}]}, {},
         f"{CALL}so its content must be JSON text with the keys name"),
        ({"messages": SHAREGPT}, MISFIT, "message 0 has no key 'speaker'.*message_property_mappings.role; it has from"),
        ({"text": "Hi"}, {}, NO_COLUMN),
        ({"talk": PLAIN}, {}, NO_COLUMN),
        ({"messages": PLAIN, "system": 3}, {}, "column 'system' must contain text, got int"),
        ({"messages": [SYSTEM, *PLAIN], "rules": "Be exact"}, {"field_system": "rules"},
         "column 'rules' has another one. Set drop_system_message: true"),
        *(({"messages": PLAIN, "tools": tools}, {}, rf"column 'tools' \(field_tools\) .*{message}")
          for tools, message in (("{", "is not valid JSON"), ('"add"', "a list of tool"), ([1], "a list"))),
    ],
)  # fmt: skip
def test_what_is_no_chat(row, keys, message):
    with pytest.raises(DataError, match=message):
        chat_of(row, entry(**keys)), tools_of(row, entry(**keys))
