"""Chats of any shape as messages with role and content."""

import json
import re
from functools import partial

import pytest

from ebft.data.messages import chat_of, tools_of
from ebft.errors import told
from tests.data import conftest
from tests.data.conftest import assistant, user

PLAIN = [user("Hi"), assistant("Hello")]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
SHORT = [{"r": "user", "t": "Hi"}, {"r": "assistant", "t": "Hello"}]
OTHER_ROLES = [{"role": "customer", "content": "Hi"}, {"role": "bot", "content": "Hello"}]
PERSON = {"from": "human", "value": "Hi", "person": "Ada", "weight": 0}
NAMES = {"role": "from", "content": "value", "name": "person"}
TAGGED = [user("<think>x</think>Hi"), assistant("<think>hm</think>Hello")]


entry = partial(conftest.entry, "x", type="chat_template")


@pytest.mark.parametrize(("row", "keys", "expected"), [
    ({"conversations": SHAREGPT}, {"type": "sharegpt"}, PLAIN),
    ({"talk": SHAREGPT}, {"field_messages": "talk"}, PLAIN),
    ({"talk": {"turns": PLAIN}}, {"field_messages": "talk.turns"}, PLAIN),
    ({"messages": SHORT}, {"message_property_mappings": {"role": "r", "content": "t"}}, PLAIN),
    ({"messages": OTHER_ROLES}, {"roles": {"user": ["customer"], "assistant": ["bot", "agent"]}}, PLAIN),
    ({"messages": [{**message, "extra": None} for message in PLAIN]}, {}, PLAIN),
    ({"messages": [PERSON]}, {"message_property_mappings": NAMES}, [user("Hi", name="Ada", weight=0)]),
    ({"messages": [assistant("Hello", reasoning="hm")]},
     {"field_thinking": "reasoning", "template_thinking_key": "content"},
     [assistant("<think>\nhm\n</think>\n\nHello")]),
    ({"messages": [assistant("Hello", thoughts="hm")]},
     {"field_thinking": "thoughts", "template_thinking_key": "thinking"}, [assistant("Hello", thinking="hm")]),
    ({"messages": TAGGED}, {}, TAGGED),
    ({"messages": TAGGED}, {"split_thinking": True}, [TAGGED[0], assistant("Hello", reasoning_content="hm")]),
    *(({"messages": [assistant([{"type": "thinking", "thinking": thought, "text": None}, "Hello"])]}, {},
       [assistant("Hello", reasoning_content="hm")])
      for thought in ("hm", [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}])),
    ({"messages": [], "system": "Be exact"}, {}, []),
    ({"messages": [PLAIN[0], {"role": "bard", "content": "Hello"}]}, {"roles": {"narrator": ["bard"]}},
     [PLAIN[0], {"role": "narrator", "content": "Hello"}]),
    ({"messages": json.dumps(SHAREGPT)}, {}, PLAIN),
    ({"messages": " "}, {}, []),
    ({"messages": [{"a": {"who": "user"}, "b": {"de": "Hi"}}, {"a": {"who": "assistant"}, "b": None}]},
     {"message_property_mappings": {"role": "a.who", "content": "b.de"}},
     [user("Hi", a={"who": "user"}, b={"de": "Hi"}), assistant("", a={"who": "assistant"})]),
])  # fmt: skip
def test_shapes(row, keys, expected):
    assert chat_of(row, entry(**keys)) == expected


SYSTEM = {"role": "system", "content": "Be brief"}


@pytest.mark.parametrize(("column", "chat", "keys", "system"), [
    (None, [SYSTEM, *PLAIN], {"drop_system_message": True}, None),
    (None, PLAIN, {"system_prompt": "Be kind"}, "Be kind"),
    (None, [SYSTEM, *PLAIN], {"system_prompt": "Be kind"}, "Be brief"),
    (None, PLAIN, {"field_system": "rules"}, "Be fair"),
    (None, [SYSTEM, *PLAIN], {"field_system": "rules", "drop_system_message": True}, "Be fair"),
    (None, PLAIN, {"field_system": "empty", "system_prompt": "Be kind"}, "Be kind"),
    (" ", PLAIN, {}, None),
    ("Be exact", PLAIN, {"drop_system_message": True}, None),
])  # fmt: skip
def test_system_messages(column, chat, keys, system):
    for others in ({"system": column}, *([{}] if column is None else [])):
        found = chat_of({"messages": chat, "rules": "Be fair", "empty": None, **others}, entry(**keys))
        assert found == ([{"role": "system", "content": system}] if system else []) + PLAIN


def call(arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


ARGUMENTS = '{"a":1}'


@pytest.mark.parametrize(("keys", "expected"), [
    *(({"tool_calls": [call(given)]}, call(found))
      for given, found in ((ARGUMENTS, ARGUMENTS), ({"a": 1}, {"a": 1}), (json.dumps(ARGUMENTS), ARGUMENTS),
                           (json.dumps(json.dumps(ARGUMENTS)), ARGUMENTS), ("", {}), (None, {}))),
    ({"tool_calls": call(ARGUMENTS)}, call(ARGUMENTS)),
    ({"tool_calls": json.dumps([call(ARGUMENTS)])}, call(ARGUMENTS)),
    ({"tool_calls": [json.dumps(call(json.dumps(ARGUMENTS)))]}, call(ARGUMENTS)),
    ({"tool_calls": [{"function": json.dumps(call(ARGUMENTS)["function"])}]},
     {"function": call(ARGUMENTS)["function"]}),
    ({"tool_calls": [{"name": "add", "arguments": json.dumps(ARGUMENTS), "function": None}]}, call(ARGUMENTS)),
    ({"tool_calls": [{"name": "add", "arguments": ARGUMENTS, "id": "c1"}]}, {"id": "c1", **call(ARGUMENTS)}),
    ({"function_call": call(json.dumps(ARGUMENTS))["function"]}, call(ARGUMENTS)),
    ({"function_call": json.dumps(call(ARGUMENTS)["function"]), "tool_calls": None}, call(ARGUMENTS)),
])  # fmt: skip
def test_calls_are_not_encoded_twice(keys, expected):
    for others in ({}, {"content": None}, {"content": "Wait"}):
        (found,) = chat_of({"messages": [{"role": "assistant", **others, **keys}]}, entry())
        content = {key: text for key, text in others.items() if text is not None}
        assert found == {"role": "assistant", **content, "tool_calls": [expected]}
        assert chat_of({"messages": [found]}, entry()) == [found]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}
ENCODED = {"type": "function", "function": {"name": "add", "parameters": '{"a": {"type": "integer"}}'}}


@pytest.mark.parametrize(("row", "tools"), [
    ({}, None),
    ({"tools": [TOOL]}, [TOOL]),
    ({"tools": json.dumps([ENCODED])}, [TOOL]),
    ({"tools": [{**TOOL, "strict": None}]}, [{**TOOL, "strict": None}]),
    ({"tools": '[{"type": "function"}]'}, [{"type": "function"}]),
])  # fmt: skip
def test_tools(row, tools):
    assert tools_of(row, entry()) == tools
    assert tools_of({"mine": row.get("tools")}, entry(field_tools="mine")) == tools
    assert tools_of({"meta": row}, entry(field_tools="meta.tools")) == tools


@pytest.mark.parametrize(("row", "keys", "message"), [
    ({"messages": SHAREGPT}, {"message_property_mappings": {"role": "speaker", "content": "value"}},
     "must contain a list of messages with the keys role and content.*message_property_mappings"),
    ({"talk": PLAIN}, {}, "no column with messages: expected messages, conversations, .*field_messages"),
    ({"messages": [SYSTEM, *PLAIN], "rules": "Be exact"}, {"field_system": "rules"},
     "column 'rules' has another one. Set drop_system_message: true"),
    ({"messages": [user("?"), assistant("", tool_calls=[call("[1]")])]}, {}, r"must be a JSON object .*'\[1\]'"),
])  # fmt: skip
def test_what_is_no_chat(row, keys, message):
    with pytest.raises(Exception) as caught:
        chat_of(row, entry(**keys)), tools_of(row, entry(**keys))
    assert re.search(message, told(caught.value))
