"""Prompts, references and the ids between turns."""

import copy
import signal
import time

import pytest

from ebft.data import conversation as conversations
from ebft.data import rendering
from ebft.data.apply import _Step
from ebft.data.conversation import Renderer, without_end
from ebft.data.rendering import ChatTemplate
from ebft.errors import DataError
from tests.structured.conftest import chat_tokenizer  # noqa: F401 - a fixture

PROMPT = [{"role": "user", "content": "hello"}]
TURNS = [
    {"role": "user", "content": "and now?", "name": None},
    {"role": "assistant", "content": "now this"},
    {"role": "user", "content": "go on"},
]


def decoded(tokenizer, ids):
    return tokenizer.decode(ids)


def test_turns_as_the_template_puts_them(chat_tokenizer):  # noqa: F811
    conversation = Renderer(chat_tokenizer).conversation(PROMPT, "first", TURNS)
    leads = [decoded(chat_tokenizer, turn.lead_ids) for turn in conversation.turns]
    assert leads == [
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert decoded(chat_tokenizer, conversation.reference_ids) == "first" + leads[1] + "now this"


def test_a_text_prompt_has_the_tokenizers_special_tokens(tiny_tokenizer_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    conversation = Renderer(tokenizer).conversation("def f", "(x):")
    assert conversation.prompt_ids == tokenizer("def f")["input_ids"]
    assert conversation.prompt_ids[0] == tokenizer.bos_token_id
    assert conversation.reference_ids == tokenizer("(x):", add_special_tokens=False)["input_ids"]


def test_one_terminating_token_is_left_out(chat_tokenizer):  # noqa: F811
    renderer = Renderer(chat_tokenizer)
    end, eos = chat_tokenizer.convert_tokens_to_ids("<|im_end|>"), chat_tokenizer.eos_token_id
    assert renderer.end_ids() == {end, eos}
    for prompt, end_id in ((PROMPT, end), ("text", eos)):
        found = [renderer.conversation(prompt, text) for text in ("yes<|im_end|>", "yes")]
        assert found[0].reference_ids == found[1].reference_ids and found[0].end_id == end_id
    assert without_end([5, eos, end], {end, eos}) == [5, eos]


def test_template_arguments_reach_the_template(chat_tokenizer):  # noqa: F811
    import copy

    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template += "{% if thinking is defined %}<think>{% endif %}"
    assert decoded(tokenizer, Renderer(tokenizer, {"thinking": True}).prompt_ids(PROMPT)).endswith("<think>")
    assert not decoded(tokenizer, Renderer(tokenizer).prompt_ids(PROMPT)).endswith("<think>")


@pytest.mark.parametrize(
    ("prompt", "turns", "message"),
    [
        ("text", TURNS, "requires a prompt of messages"),
        (PROMPT, [TURNS[1], TURNS[1]], "two consecutive assistant turns"),
        (PROMPT, [TURNS[0], {"role": "assistant", "content": [{"type": "text"}]}], "part whose text is missing"),
        ([{"content": "a"}], None, "message 0 has no role"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], None, "part of type 'image'"),
        ("", None, "empty prompt"),
    ],
)
def test_refuses(chat_tokenizer, prompt, turns, message):  # noqa: F811
    with pytest.raises(DataError, match=message):
        Renderer(chat_tokenizer).conversation(prompt, "x", turns)


def test_messages_need_a_template(chat_tokenizer):  # noqa: F811
    import copy

    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        Renderer(tokenizer).prompt_ids(PROMPT)


def test_conversations_that_are_remembered_are_those_of_their_own_row(chat_tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(conversations, "REMEMBERED", 400)
    renderer = Renderer(chat_tokenizer)
    rows = [(prompt, truth, turns) for prompt in (PROMPT, "text") for truth in ("a", "b") for turns in (TURNS, None)]
    rows = [row for row in rows if row[0] == PROMPT or not row[2]]
    for row in [*rows, *rows[::-1], *rows]:
        assert renderer.conversation(*row) == Renderer(chat_tokenizer).conversation(*row)
    assert renderer.conversation(*rows[-1]) is renderer.conversation(*rows[-1])
    assert 1 < len(renderer._rendered) < len(rows) and sum(map(len, renderer._rendered)) <= 400
    with pytest.raises(DataError):
        renderer.conversation("text", "a", TURNS)


def test_a_gap_is_rendered_after_all_turns_before_it(chat_tokenizer):  # noqa: F811
    import copy

    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}[{{ loop.index }}]{{ m.content }}{% endfor %}"
    turns = [{"role": role, "content": role[0] + str(n)} for n in range(2) for role in ("user", "assistant")]
    conversation = Renderer(tokenizer).conversation(PROMPT, "first", turns)
    assert [decoded(tokenizer, turn.lead_ids) for turn in conversation.turns] == ["[1]hello", "[3]u0", "[5]u1"]


def test_a_message_may_contain_what_stands_in_for_a_reply(chat_tokenizer):  # noqa: F811
    turns = [{"role": "user", "content": f"say {rendering._REPLY} again"}, {"role": "assistant", "content": "b"}]
    lead = Renderer(chat_tokenizer).conversation(PROMPT, "a", turns).turns[1].lead_ids
    assert f"user\nsay {rendering._REPLY} again" in decoded(chat_tokenizer, lead)


def test_a_turn_that_only_calls_a_tool_is_no_reply(chat_tokenizer):  # noqa: F811
    import copy

    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content else m.tool_calls[0].name }}{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "weather"}]}
    turns = [{"role": "user", "content": "now?"}, call, {"role": "tool", "content": "sun"}]
    conversation = Renderer(tokenizer).conversation(PROMPT, "a", [*turns, {"role": "assistant", "content": "sunny"}])
    assert [decoded(tokenizer, turn.reference_ids) for turn in conversation.turns] == [
        "<assistant>a",
        "<assistant>sunny",
    ]
    assert decoded(tokenizer, conversation.turns[1].lead_ids) == "<user>now?<assistant>weather<tool>sun"


def test_turns_without_text_are_given(chat_tokenizer):  # noqa: F811
    """Neither empty replies are sampled nor turns that only call tools, whether their content is empty or null."""
    import copy

    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message.content }}", "{{ message.content }}{{ message.tool_calls[0].name if message.tool_calls }}"
    )
    call = {"role": "assistant", "tool_calls": [{"name": "look"}]}
    for content in ({"content": ""}, {"content": None}, {}):
        turns = [{"role": "user", "content": "now?"}, {**call, **content}, {"role": "tool", "content": "sun"}]
        found = Renderer(tokenizer).conversation(PROMPT, "a", [*turns, {"role": "assistant", "content": "b"}])
        assert [decoded(tokenizer, turn.reference_ids) for turn in found.turns] == ["a", "b"]
        assert "assistant\nlook<|im_end|>" in decoded(tokenizer, found.turns[1].lead_ids)
    empty = [{"role": "user", "content": "now?"}, {"role": "assistant", "content": " "}]
    assert len(Renderer(tokenizer).conversation(PROMPT, "a", empty).turns) == 1


def test_the_end_of_an_earlier_reply_that_has_one_of_its_own_is_kept(chat_tokenizer):  # noqa: F811
    turns = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "b<|im_end|>"}]
    messages = [*PROMPT, {"role": "assistant", "content": "a<|im_end|>"}, *turns]
    found = Renderer(chat_tokenizer).conversation(PROMPT, "a<|im_end|>", turns)
    whole = chat_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    ours = [*found.prompt_ids, *found.reference_ids, found.end_id]
    assert whole[: len(ours)] == ours and decoded(chat_tokenizer, ours).endswith("assistant\nb<|im_end|>")


SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [(SLOW, "it takes more than 0.2 s, so its loops may have no end"), ("{{ 1 / 0 }}", "division by zero")],
)
def test_templates_that_cannot_be_rendered(chatml, text, problem, monkeypatch):
    monkeypatch.setattr("ebft.data.rendering.SECONDS", 0.2)
    tokenizer = copy.deepcopy(chatml)
    tokenizer.chat_template = text
    for _ in range(2):  # at once when it is rendered again
        with pytest.raises(DataError, match=f"chat template of the tokenizer cannot render .*: {problem}"):
            ChatTemplate(tokenizer)([{"role": "user", "content": "?"}])
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    tokenizer.chat_template = "{% for a in range(99999) %}{% endfor %}{{ messages[0].content }}"
    assert ChatTemplate(tokenizer)([{"role": "user", "content": "?"}]) == "?"


def test_a_row_that_takes_long_is_named(monkeypatch, capsys):
    monkeypatch.setattr("ebft.config.user_code.FIRST", 0.1)
    step = _Step("rows.jsonl, train: transform 'own.slow'", slow, None, dict)
    step.row({"text": "a"}, 3)
    assert "rows.jsonl, train: transform 'own.slow', row 3 has been running for" in capsys.readouterr().err


def slow(row, tokenizer):
    time.sleep(0.4)
    return row
