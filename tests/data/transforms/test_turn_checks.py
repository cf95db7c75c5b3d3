"""Chat templates that omit what is trained on: contents, calls and descriptions of tools, ends of turns."""

import pytest

from ebft.errors import DataError
from tests.data.conftest import CHATML, assistant, tokenised, user, warned
from tests.structured.conftest import make_chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}]
CHAT = [user("Hi"), assistant("Hello")]
CALLING = [
    CHAT[0],
    assistant("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]),
]
BOTH = [CHAT[0], {**CALLING[1], "content": "Let me add."}]
CALL_TEXT = "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
CALLS = CHATML.replace("<|im_end|>", f"{{% for c in m.tool_calls or [] %}}{CALL_TEXT}{{% endfor %}}<|im_end|>")
DROPS = CALLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
ENDLESS = CHATML.replace("<|im_end|>", "")


def rows(template, messages, entry=None, count=1, **columns):
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = template
    found = tokenised(tokenizer, "chat_template", *[{"messages": messages, **columns}] * count, entry=entry)
    return [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in found]


@pytest.mark.parametrize(
    ("template", "chat", "given", "message"),
    [
        (DROPS, BOTH, {}, "leaves out the text of turns that also call tools (for example 'Let me add.')"),
        (CALLS, BOTH, {}, None),
        (DROPS, CALLING, {}, None),
        (CHATML, CHAT, {"tools": TOOLS}, "ignores the descriptions of tools of the rows"),
        ("{{ tools | tojson if tools }}" + CHATML, CHAT, {"tools": TOOLS}, None),
        (ENDLESS, CHAT, {}, "writes nothing after a reply, so the model does not learn"),
        (CHATML, CHAT, {}, None),
        (CHATML, CHAT, {"entry": {"train_on_eos": "none"}}, None),
    ],
)
def test_what_is_left_out_has_one_warning(template, chat, given, message):
    found = warned(rows, template, chat, count=3, **given)
    assert len(found) == (message is not None) and (
        not found or f"chat template of the tokenizer {message}" in found[0]
    )


def test_contents_that_are_changed_and_calls_that_are_omitted():
    for change in ("{{ m.content | upper }}", "{{ m.content | replace('l', 'L') }}"):
        assert rows(CHATML.replace("{{ m.content }}", change), CHAT)[0].upper() == "HELLO<|IM_END|>\n"
    assert rows(CALLS, CALLING) == ['<call>add{"a": 1}</call><|im_end|>\n']
    with pytest.raises(DataError, match=r"row 0: .* omits the tool calls of message 1 \(assistant\).*another chat_t"):
        rows(CHATML, BOTH)
