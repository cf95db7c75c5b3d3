"""Turns of chats whose template renders a message differently if others follow; trained text is in brackets."""

import pytest
from datasets import Dataset

from ebft.config.schema import RunConfig
from ebft.data.apply import tokenise
from ebft.errors import DataError
from tests.structured.conftest import make_chat_tokenizer

# Omits the thinking of turns before the last question, and opens an empty block in the last turn.
LAST_THINKS = """
{%- if tools %}<s>tools{% for t in tools %} {{ t.function.name }}{% endfor %}<e>
{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- set text = m.content or '' %}
  {%- set thought = m.reasoning_content or '' %}
  {%- if m.role == 'assistant' and '</think>' in text %}
    {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}
    {%- set text = text.split('</think>')[-1].lstrip() %}
  {%- endif %}
  {{- '<s>' + m.role + '\n' }}
  {%- if m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or thought) %}
    {{- '<think>\n' + thought + '\n</think>\n\n' }}
  {%- endif %}
  {{- text }}
  {%- for c in m.tool_calls or [] %}{{ '\n<call>' + c.function.name + ' ' + c.function.arguments | tojson + '</call>' }}
  {%- endfor %}
  {{- '<e>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<s>assistant
{% endif %}"""

# Ends the text with another token, unless a reply is asked for.
ENDS_TEXT = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% else %}<eos>{% endif %}"
)

# The generation prompt opens a block of thinking, which no reply of a chat has.
OPENS_THINKING = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}"
    "<A>{{ m.content.split('</think>')[-1] }}<e>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)

# Replies have channels, and only the last one has the final end.
CHANNELS = """
{%- for m in messages %}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {{- '<s>assistant to=' + m.tool_calls[0].function.name + '<m>' + m.tool_calls[0].function.arguments | tojson }}
    {{- '<call>' }}
  {%- elif m.role == 'assistant' %}
    {%- if m.thinking and loop.last %}{{ '<s>assistant analysis<m>' + m.thinking + '<e>' }}{% endif %}
    {{- '<s>assistant final<m>' + m.content }}
    {{- '<return>' if loop.last and not add_generation_prompt else '<e>' }}
  {%- elif m.role == 'tool' %}
    {{- '<s>' + messages[loop.index0 - 1].tool_calls[0].function.name + '<m>' + m.content | tojson + '<e>' }}
  {%- else %}{{ '<s>' + m.role + '<m>' + m.content + '<e>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<s>assistant{% endif %}"""

SPECIAL = ["<s>", "<e>", "<eos>", "<bos>", "<U>", "<A>", "<return>", "<call>"]
SAY = lambda role, content, **keys: {"role": role, "content": content, **keys}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [SAY("user", "Hi"), SAY("assistant", "Hello"), SAY("user", "Bye"), SAY("assistant", "Goodbye")]
CALLING = [
    SAY("user", "1+1"),
    SAY("assistant", "", tool_calls=[CALL]),
    SAY("tool", "two"),
    SAY("assistant", "It is two"),
]


def make_tokenizer(template):
    tokenizer = make_chat_tokenizer()  # one token per byte
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


def shown(row, tokenizer):
    """The text of a row, with brackets around what is trained on."""
    text, inside = "", False
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        text += "]" * (inside and label == -100) + "[" * (not inside and label != -100) + tokenizer.decode([token])
        inside = label != -100
    return text + "]" * inside


@pytest.fixture
def trained():
    def run(template, messages, entry=None, type="chat_template", tools=None, **keys):
        tokenizer = make_tokenizer(template)
        datasets = [{"path": "x", "type": type, **(entry or {})}]
        config = RunConfig.from_dict({"base_model": "x", "datasets": datasets, **keys})
        example = {"messages": messages} | ({} if tools is None else {"tools": tools})
        row = tokenise(Dataset.from_list([example]), config.datasets[0], config, tokenizer)[0]
        text = shown(row, tokenizer)
        whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        if messages[-1]["role"] == "assistant" and type == "chat_template":
            assert text.replace("[", "").replace("]", "") == whole
        return text

    return run


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            LAST_THINKS,
            "<s>user\nHi<e>\n<s>assistant\n[Hello<e>\n]<s>user\nBye<e>\n"
            "<s>assistant\n[<think>\n\n</think>\n\nGoodbye<e>\n]",
        ),
        (ENDS_TEXT, "<s>user\nHi<e>\n<s>assistant\n[Hello<e>\n]<s>user\nBye<e>\n<s>assistant\n[Goodbye<e>\n<eos>]"),
        (OPENS_THINKING, "<bos><U>Hi<A>[Hello<e>]<U>Bye<A>[Goodbye<e>]"),
        (
            CHANNELS,
            "<s>user<m>Hi<e><s>assistant[ final<m>Hello<e>]<s>user<m>Bye<e><s>assistant[ final<m>Goodbye<return>]",
        ),
    ],
)
def test_several_turns(trained, template, expected):
    assert trained(template, TALK) == expected


@pytest.mark.parametrize("special", [[], ["<think>", "</think>"], ["<think>", "</think>", "<call>", "</call>"]])
def test_tags_of_thinking_can_be_special_tokens(trained, monkeypatch, special):
    monkeypatch.setattr(f"{__name__}.SPECIAL", [token for token in SPECIAL if token != "<call>"] + special)
    template = (
        "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{{ '' if m.tool_calls else '<think></think>' }}{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<e>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
    )
    assert trained(template, TALK[:2]) == "<s>user\nHi<e>\n<s>assistant\n<think>[</think>Hello<e>\n]"
    call = '<s>user\n1+1<e>\n<s>assistant\n[<call>{"name": "add", "arguments": {"a": 1}}</call><e>\n]'
    assert trained(template, CALLING[:2]) == call


def test_an_empty_reply_between_others(trained):
    silent = [TALK[0], {"role": "assistant", "content": ""}, *TALK[2:]]
    assert trained(LAST_THINKS, silent) == (
        "<s>user\nHi<e>\n<s>assistant\n<e>\n<s>user\nBye<e>\n<s>assistant\n[<think>\n\n</think>\n\nGoodbye<e>\n]"
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LAST_THINKS, "<s>user\nHi<e>\n<s>assistant\n[<think>\n\n</think>\n\nHello<e>\n]"),
        (ENDS_TEXT, "<s>user\nHi<e>\n<s>assistant\n[Hello<e>\n<eos>]"),
        (OPENS_THINKING, "<bos><U>Hi<A>[Hello<e>]"),
        (CHANNELS, "<s>user<m>Hi<e><s>assistant[ final<m>Hello<return>]"),
    ],
)
def test_one_turn(trained, template, expected):
    assert trained(template, TALK[:2]) == expected


THOUGHT = [
    TALK[0],
    SAY("assistant", "<think>a</think>Hello"),
    TALK[2],
    SAY("assistant", "<think>b</think>Goodbye"),
]


def test_thinking_in_the_content(trained):
    assert trained(LAST_THINKS, THOUGHT) == (
        "<s>user\nHi<e>\n<s>assistant\n[Hello<e>\n]<s>user\nBye<e>\n<s>assistant\n[<think>\nb\n</think>\n\nGoodbye<e>\n]"
    )
    with pytest.raises(DataError, match=r"omits the thinking of message 1 \(assistant\)"):
        trained(OPENS_THINKING, THOUGHT)


def test_thinking_is_masked(trained):
    shown = trained(LAST_THINKS, THOUGHT, ebft={"mask_thinking_ce": True})
    assert shown.endswith(
        "<s>assistant\n[Hello<e>\n]<s>user\nBye<e>\n<s>assistant\n<think>\nb\n</think>\n\n[Goodbye<e>\n]"
    )


@pytest.mark.parametrize(
    ("template", "key", "expected"),
    [
        (LAST_THINKS, "reasoning_content", "<s>assistant\n[<think>\nhm\n</think>\n\nGoodbye<e>\n]"),
        (CHANNELS, "thinking", "<s>assistant[ analysis<m>hm<e><s>assistant final<m>Goodbye<return>]"),
    ],
)
def test_thinking_in_a_key(trained, template, key, expected):
    chat = [TALK[0], {**TALK[1], key: "no"}, TALK[2], {**TALK[3], key: "hm"}]
    text = trained(template, chat)
    assert text.endswith(expected) and "no" not in text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            LAST_THINKS,
            '<s>user\n1+1<e>\n<s>assistant\n[\n<call>add {"a": 1}</call><e>\n]<s>tool\ntwo<e>\n'
            "<s>assistant\n[<think>\n\n</think>\n\nIt is two<e>\n]",
        ),
        (
            CHANNELS,
            '<s>user<m>1+1<e><s>assistant[ to=add<m>{"a": 1}<call>]<s>add<m>"two"<e>'
            "<s>assistant[ final<m>It is two<return>]",
        ),
    ],
)
def test_tool_calls(trained, template, expected):
    assert trained(template, CALLING) == expected


def test_descriptions_of_tools(trained):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = trained(LAST_THINKS, CALLING, tools=tools)
    assert text.startswith(
        '<s>tools add<e>\n<s>user\n1+1<e>\n<s>assistant\n[\n<call>add {"a": 1}</call><e>\n]<s>tool\n'
    )


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        (ENDS_TEXT, "none", "<s>assistant\n[Hello]<e>\n<s>user\nBye<e>\n<s>assistant\n[Goodbye]<e>\n<eos>"),
        (ENDS_TEXT, "last", "<s>assistant\n[Hello]<e>\n<s>user\nBye<e>\n<s>assistant\n[Goodbye<e>\n<eos>]"),
        (
            CHANNELS,
            "none",
            "<s>assistant[ final<m>Hello]<e><s>user<m>Bye<e><s>assistant[ final<m>Goodbye]<return>",
        ),
        (
            LAST_THINKS,
            "all",
            "<s>user\nHi[<e>\n]<s>assistant\n[Hello<e>\n]<s>user\nBye[<e>\n]<s>assistant\n"
            "[<think>\n\n</think>\n\nGoodbye<e>\n]",
        ),
    ],
)
def test_ends_of_turns(trained, template, eos, expected):
    assert trained(template, TALK, {"train_on_eos": eos}).endswith(expected)


def test_the_end_of_a_call_is_what_follows_the_call(trained):
    text = trained(CHANNELS, CALLING, {"train_on_eos": "none"})
    assert '<s>assistant[ to=add<m>{"a": 1}]<call><s>add<m>"two"<e><s>assistant[ final<m>It is two]<return>' in text


def test_ends_of_all_turns_need_one_end(trained):
    with pytest.raises(DataError, match="train_on_eos: all is not supported with chat template of the tokenizer"):
        trained(CHANNELS, TALK, {"train_on_eos": "all"})


def test_other_roles(trained):
    assert trained(ENDS_TEXT, TALK, {"roles_to_train": ["user", "assistant"]}) == (
        "<s>user\n[Hi<e>\n]<s>assistant\n[Hello<e>\n]<s>user\n[Bye<e>\n]<s>assistant\n[Goodbye<e>\n<eos>]"
    )


def test_a_generation_prompt_that_opens_a_block_which_replies_close(trained):
    closes = (
        "{{ messages | length }}{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}<think></think>"
        "{% endif %}{{ m.content }}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
    )
    assert trained(closes, TALK) == (
        "4<s>user\nHi<e>\n<s>assistant\n<think>[</think>Hello<e>\n]<s>user\nBye<e>\n"
        "<s>assistant\n<think>[</think>Goodbye<e>\n]"
    )


def test_a_reply_with_another_header_than_a_new_reply(trained):
    other = ENDS_TEXT.replace("<s>assistant\n{% else", "<A>{% else")
    with pytest.raises(DataError, match=r"writes another text before message 1 \(assistant\) than before a new reply"):
        trained(other, TALK)


def test_a_prompt_that_depends_on_the_reply(trained):
    with pytest.raises(DataError, match=r"depending on the content of message 1 \(assistant\)"):
        trained("{{ messages[-1].content | length }}" + ENDS_TEXT, TALK[:2])


@pytest.mark.parametrize(("turns", "first"), [("transform", "[Hello<e>]"), ("transform_last_turn", "Hello<e>")])
def test_turns_of_strided_mode(trained, turns, first):
    strided = {"rl": "ebft", "ebft": {"mode": "strided"}, "type": f"ebft_strided_chat.{turns}"}
    assert trained(OPENS_THINKING, TALK, **strided) == f"<bos><U>Hi<A>{first}<U>Bye<A>[Goodbye<e>]"


def test_a_content_with_the_start_and_end_of_a_mark(trained):
    chat = [SAY("user", "A"), SAY("assistant", "AEBFT-MARK-"), SAY("user", "Z"), SAY("assistant", "A EBFT-MARK-Z")]
    assert trained(ENDS_TEXT, chat) == (
        "<s>user\nA<e>\n<s>assistant\n[AEBFT-MARK-<e>\n]<s>user\nZ<e>\n<s>assistant\n[A EBFT-MARK-Z<e>\n<eos>]"
    )


def test_a_template_that_omits_a_turn(trained):
    omits = "{{ messages | length }}" + ENDS_TEXT.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}")
    with pytest.raises(DataError, match=r"omits the content of message 1 \(assistant\)"):
        trained(omits, TALK)


def test_a_template_whose_ends_have_no_special_token(trained):
    words = CHANNELS.replace("<return>", "(done)").replace("'<e>'", "'(next)'")
    with pytest.raises(DataError, match=r"ends message 1 \(assistant\) differently than the last turn"):
        trained(words, TALK)


def test_special_tokens_without_a_name_end_turns():
    tokenizer = make_chat_tokenizer()
    assert "<|im_end|>" not in tokenizer.all_special_tokens
    tokenizer.chat_template = ENDS_TEXT.replace("<e>", "<|im_end|>").replace("<eos>", "<|endoftext|>")
    config = RunConfig.from_dict({"base_model": "x", "datasets": [{"path": "x", "type": "chat_template"}]})
    row = tokenise(Dataset.from_list([{"messages": TALK}]), config.datasets[0], config, tokenizer)[0]
    assert shown(row, tokenizer) == (
        "<s>user\nHi<|im_end|>\n<s>assistant\n[Hello<|im_end|>\n]<s>user\nBye<|im_end|>\n"
        "<s>assistant\n[Goodbye<|im_end|>\n<|endoftext|>]"
    )
