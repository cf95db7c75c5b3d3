"""Prompts, references and the ids between turns."""

import pytest

from ebft.data import conversation as conversations
from ebft.data import rendering
from ebft.data.conversation import Renderer, without_end
from ebft.errors import DataError
from ebft.run.config.schema import RunConfig
from tests.data.conftest import assistant, config_of, user
from tests.structured.conftest import make_chat_tokenizer

PROMPT = [user("hello")]
TURNS = [user("and now?", name=None), assistant("now this"), user("go on")]


@pytest.fixture
def chat_tokenizer():
    return make_chat_tokenizer()


def conversation_of(renderer, prompt, truth, turns=None):
    return renderer.of_row({"prompt": prompt, "ground_truth": truth, "remaining_turns": turns})


def parts(tokenizer, conversation):
    """The texts before the replies, and the replies."""
    turns = conversation.turns
    return [tokenizer.decode(t.lead_ids) for t in turns], [tokenizer.decode(t.reference_ids) for t in turns]


def test_one_terminating_token_is_left_out(chat_tokenizer):
    renderer = Renderer(chat_tokenizer)
    end, eos = chat_tokenizer.convert_tokens_to_ids("<|im_end|>"), chat_tokenizer.eos_token_id
    assert renderer.template.end_ids == {end, eos}
    for prompt, end_id in ((PROMPT, end), ("text", eos)):
        found = [conversation_of(renderer, prompt, text) for text in ("yes<|im_end|>", "yes")]
        assert found[0].reference_ids == found[1].reference_ids and found[0].end_id == end_id
    assert without_end([5, eos, end], {end, eos}) == [5, eos]
    with pytest.raises(DataError, match="requires a prompt of messages"):
        conversation_of(renderer, "text", "x", TURNS)


def test_conversations_that_are_remembered_are_those_of_their_own_row(chat_tokenizer, monkeypatch):
    monkeypatch.setattr(conversations, "REMEMBERED", 400)
    renderer = Renderer(chat_tokenizer)
    rows = [(prompt, truth, turns) for prompt in (PROMPT, "text") for truth in ("a", "b") for turns in (TURNS, None)]
    rows = [row for row in rows if row[0] == PROMPT or not row[2]]
    for row in [*rows, *rows[::-1], *rows]:
        assert conversation_of(renderer, *row) == conversation_of(Renderer(chat_tokenizer), *row)
    assert conversation_of(renderer, *rows[-1]) is conversation_of(renderer, *rows[-1])
    assert 1 < len(renderer._rendered) < len(rows) and sum(map(len, renderer._rendered)) <= 400


def test_what_is_between_replies(chat_tokenizer):
    """It is rendered after all turns before it, and may contain what stands in for a reply."""
    chat_tokenizer.chat_template = "{% for m in messages %}[{{ loop.index }}]{{ m.content }}{% endfor %}"
    turns = [user(f"say {rendering._REPLY}"), assistant("a0"), user("u1"), assistant("a1")]
    leads, _ = parts(chat_tokenizer, conversation_of(Renderer(chat_tokenizer), PROMPT, "first", turns))
    assert leads == ["[1]hello", f"[3]say {rendering._REPLY}", "[5]u1"]


def test_turns_without_text_are_given(chat_tokenizer):
    """Neither empty replies are sampled nor turns that only call tools, whether their content is empty or null."""
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace(
        "{{ message.content }}", "{{ message.content }}{{ message.tool_calls[0].name if message.tool_calls }}"
    )
    call = {"role": "assistant", "tool_calls": [{"name": "look"}]}
    for content in ({"content": ""}, {"content": None}, {}):
        turns = [user("now?"), {**call, **content}, {"role": "tool", "content": "sun"}, assistant("b")]
        leads, replies = parts(chat_tokenizer, conversation_of(Renderer(chat_tokenizer), PROMPT, "a", turns))
        assert replies == ["a", "b"] and "assistant\nlook<|im_end|>" in leads[1]
    empty = [user("now?"), assistant(" ")]
    assert len(conversation_of(Renderer(chat_tokenizer), PROMPT, "a", empty).turns) == 1


def test_the_end_of_an_earlier_reply_that_has_one_of_its_own_is_kept(chat_tokenizer):
    turns = [user("go on"), assistant("b<|im_end|>")]
    found = conversation_of(Renderer(chat_tokenizer), PROMPT, "a<|im_end|>", turns)
    messages = [*PROMPT, assistant("a<|im_end|>"), *turns]
    whole = chat_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    ours = [*found.prompt_ids, *found.reference_ids, found.end_id]
    assert whole[: len(ours)] == ours and chat_tokenizer.decode(ours).endswith("assistant\nb<|im_end|>")


def test_arguments_of_all_datasets_are_those_of_the_run():
    def found(*given, **keys):
        datasets = [{"path": "p", "type": "chat_template", "chat_template_kwargs": kwargs} for kwargs in given]
        return RunConfig.from_dict({"base_model": "m", "datasets": datasets, **keys}).chat_template_kwargs

    assert found({"a": 1}, {"a": 1}) == {"a": 1}
    assert found({"a": 1}, {"a": 2}) is None and found({"a": 1}, None) is None
    assert found({"a": 1}, chat_template_kwargs={"a": 2}) == {"a": 2}
    two = {"chat_template_kwargs": {"a": 1}, "trl": {"chat_template_kwargs": {"a": 2}}}
    with pytest.raises(ValueError, match="chat_template_kwargs and trl.chat_template_kwargs differ"):
        config_of("ebft_opencode.transform", rl="ebft", **two)
