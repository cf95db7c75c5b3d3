"""Chat templates that omit what is trained on: contents, calls and descriptions of tools, ends of turns."""

import warnings

import pytest
from datasets import Dataset

from ebft.config.schema import RunConfig
from ebft.data.apply import tokenise
from ebft.errors import DataError
from tests.structured.conftest import make_chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CALLING = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]


def rows(template, messages, entry=None, count=1, type="chat_template", **columns):
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = template
    config = RunConfig.from_dict({"base_model": "x", "datasets": [{"path": "x", "type": type, **(entry or {})}]})
    found = tokenise(
        Dataset.from_list([{"messages": messages, **columns}] * count), config.datasets[0], config, tokenizer
    )
    return [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in found]


def warned(*args, **kwargs):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        rows(*args, **kwargs)
    return [str(warning.message) for warning in found]


TALK = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TALK += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL_TEXT = "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
CALLS = TALK.replace("<|im_end|>", f"{{% for c in m.tool_calls or [] %}}{CALL_TEXT}{{% endfor %}}<|im_end|>")
OMITS = TALK.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}")
ENDLESS = TALK.replace("<|im_end|>", "")


@pytest.mark.parametrize("type", ["chat_template", "ebft_strided_chat"])
def test_an_omitted_content(type):
    with pytest.raises(DataError, match=r"row 0: chat template .* omits the content of message 1 \(assistant\)"):
        rows(OMITS, CHAT, type=type)


def test_text_beside_a_call_that_the_template_leaves_out():
    drops = CALLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    both = [CHAT[0], {**CALLING[1], "content": "Let me add."}]
    (warning,) = warned(drops, both, count=3)
    assert "leaves out the text of turns that also call tools (for example 'Let me add.')" in warning
    assert warned(CALLS, both) == [] and warned(drops, CALLING) == []


@pytest.mark.parametrize("change", ["{{ m.content | upper }}", "{{ m.content | replace('l', 'L') }}"])
def test_a_changed_content_is_not_omitted(change):
    assert rows(TALK.replace("{{ m.content }}", change), CHAT)[0].upper() == "HELLO<|IM_END|>\n"


def test_omitted_thinking():
    drops = TALK.replace("m.content }}", "m.content.split('</think>')[-1] }}")
    chat = [CHAT[0], {"role": "assistant", "content": "<think>hm</think>Hello"}]
    with pytest.raises(DataError, match=r"omits the thinking of message 1 \(assistant\), which is in its content"):
        rows(drops, chat)


def test_omitted_calls():
    with pytest.raises(DataError, match=r"omits the tool calls of message 1 \(assistant\).*another chat_template"):
        rows(TALK, CALLING)
    with pytest.raises(DataError, match="omits the tool calls"):
        rows(TALK, [CHAT[0], {**CALLING[1], "content": "Let me add"}])
    strict = CALLS + "{{ raise_exception('unknown') if messages[-1].tool_calls and "
    strict += "messages[-1].tool_calls[0].function.name != 'add' }}"
    assert rows(strict, CALLING) == ['<call>add{"a": 1}</call><|im_end|>\n']
    assert rows(CALLS, CALLING) == ['<call>add{"a": 1}</call><|im_end|>\n']


def test_ignored_descriptions_of_tools_have_one_warning():
    (warning,) = warned(TALK, CHAT, count=3, tools=TOOLS)
    assert warning.startswith("chat template of the tokenizer ignores the descriptions of tools of the rows")
    assert warned("{{ tools | tojson if tools }}" + TALK, CHAT, tools=TOOLS) == []
    assert warned(TALK, CHAT) == []


def test_replies_without_an_end_have_one_warning():
    (warning,) = warned(ENDLESS, CHAT, count=3)
    assert warning.startswith(
        "chat template of the tokenizer writes nothing after a reply, so the model does not learn"
    )
    assert warned(TALK, CHAT) == [] and warned(TALK, CHAT, {"train_on_eos": "none"}) == []
