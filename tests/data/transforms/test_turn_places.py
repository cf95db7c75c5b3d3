"""Turns of chats whose template renders a message differently if others follow; trained text is in brackets."""

import pytest

from ebft.data import rendering, turns
from ebft.errors import DataError
from tests.data.conftest import assistant, tokenised, user
from tests.structured.conftest import make_chat_tokenizer

# Ends the text with another token, unless a reply is asked for.
ENDS_TEXT = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% else %}<eos>{% endif %}"
)

SPECIAL = ["<s>", "<e>", "<eos>", "<bos>", "<U>", "<A>", "<return>", "<call>"]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [user("Hi"), assistant("Hello"), user("Bye"), assistant("Goodbye")]
CALLING = [user("1+1"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "two"}, assistant("It is two")]
THINKING = "{% if m.role == 'assistant' and not m.tool_calls %}<think></think>{% endif %}"
CLOSES = (  # the generation prompt opens a block that replies close
    "{% for m in messages %}<s>{{ m.role }}\n" + THINKING + "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
)


def trained(template, messages, entry=None, type="chat_template", special=SPECIAL, **keys):
    """The text of a row, with brackets around what is trained on."""
    tokenizer = make_chat_tokenizer()  # one token per byte
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    (row,) = tokenised(tokenizer, type, {"messages": messages}, entry=entry, **keys)
    text, inside = "", False
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        text += "]" * (inside and label == -100) + "[" * (not inside and label != -100) + tokenizer.decode([token])
        inside = label != -100
    text += "]" * inside
    # A last reply that the next turn would end is closed with its token.
    assert text.replace("[", "").replace("]", "").startswith(tokenizer.apply_chat_template(messages, tokenize=False))
    return text


@pytest.mark.parametrize(("template", "chat", "entry", "expected"), [
    (ENDS_TEXT, TALK, {}, "<s>user\nHi<e>\n<s>assistant\n[Hello<e>\n]<s>user\nBye<e>\n"
     "<s>assistant\n[Goodbye<e>\n<eos>]"),
    (ENDS_TEXT, TALK, {"train_on_eos": "none"}, "<s>user\nHi<e>\n<s>assistant\n[Hello]<e>\n<s>user\nBye<e>\n"
     "<s>assistant\n[Goodbye]<e>\n<eos>"),
    (ENDS_TEXT, TALK, {"train_on_eos": "last"}, "<s>user\nHi<e>\n<s>assistant\n[Hello]<e>\n<s>user\nBye<e>\n"
     "<s>assistant\n[Goodbye<e>\n<eos>]"),
    (ENDS_TEXT.replace("m.content", "m.content | upper"), TALK, {"roles_to_train": ["user", "assistant"]},
     "<s>user\n[HI<e>\n]<s>assistant\n[HELLO<e>\n]<s>user\n[BYE<e>\n]<s>assistant\n[GOODBYE<e>\n<eos>]"),
    ("{{ messages | length }}" + CLOSES, TALK, {}, "4<s>user\nHi<e>\n<s>assistant\n<think>[</think>Hello<e>\n]"
     "<s>user\nBye<e>\n<s>assistant\n<think>[</think>Goodbye<e>\n]"),
])  # fmt: skip
def test_places(template, chat, entry, expected):
    assert trained(template, chat, entry) == expected


@pytest.mark.parametrize("special", [[], ["<think>", "</think>"], ["<think>", "</think>", "<call>", "</call>"]])
def test_tags_of_thinking_can_be_special_tokens(special):
    special = [*(token for token in SPECIAL if token != "<call>"), *special]
    reply = "<s>user\nHi<e>\n<s>assistant\n<think>[</think>Hello<e>\n]"
    assert trained(CLOSES, TALK[:2], special=special) == reply
    call = '<s>user\n1+1<e>\n<s>assistant\n[<call>{"name": "add", "arguments": {"a": 1}}</call><e>\n]'
    assert trained(CLOSES, CALLING[:2], special=special) == call
    # Only the end of the turn is left out, although a special token closes the call.
    assert trained(CLOSES, CALLING[:2], {"train_on_eos": "none"}, special=special) == call.replace("<e>\n]", "]<e>\n")


@pytest.mark.parametrize(("template", "entry", "message"), [
    (ENDS_TEXT.replace("<s>assistant\n{% else", "<A>{% else"), {},
     r"writes another text before message 1 \(assistant\) than before a new reply"),
    ("{{ messages[-1].content | length }}" + ENDS_TEXT, {}, r"depending on the content of message 3 \(assistant\)"),
])  # fmt: skip
def test_turns_that_cannot_be_found(template, entry, message):
    with pytest.raises(DataError, match=message):
        trained(template, TALK, entry)


def test_a_chat_of_plain_texts_is_rendered_a_few_times(monkeypatch):
    tokenizer, calls = make_chat_tokenizer(), []
    apply = rendering.ChatTemplate._apply
    monkeypatch.setattr(rendering.ChatTemplate, "_apply", lambda *given: calls.append(len(given[1])) or apply(*given))
    chat = [message for number in range(100) for message in (user(f"Q{number}"), assistant(f"A {number}"))]
    found = turns.Places(rendering.ChatTemplate(tokenizer), chat)
    places = found.turns(range(1, 200, 2))
    assert [found.text[place.start : place.ends] for place in places] == [f"A {number}" for number in range(100)]
    assert sum(calls) < 5 * len(chat)


def test_what_is_before_a_reply_may_differ_between_turns():
    template = (
        "{% for m in messages %}<s>{{ m.role }}\n{{ '(T)' if loop.index0 in (3, 7) }}{{ m.content }}<e>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    chat = [message for number in range(5) for message in (user(f"Q{number}"), assistant("A"))]
    found = trained(template, chat)
    assert found.count("[A<e>\n]") == 3 and found.count("[(T)A<e>\n]") == 2
