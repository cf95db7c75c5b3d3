"""Rows of tokenizers that add a space to each text have the ids of the whole text."""

import pytest
from datasets import Dataset

from ebft.config.schema import RunConfig
from ebft.data.apply import tokenise
from ebft.data.conversation import Renderer
from ebft.errors import DataError
from tests.data.space_tokenizers import SCHEMES, space_tokenizer

TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[ {{ m.content }} ]{% else %} {{ m.content }} </s>"
    "{% endif %}{% endfor %}"
)
LINES = (
    "{% for m in messages %}[{{ m.role[:0] }}]\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[]\n{% endif %}"
)
CHAT = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, ["b", "c", "Hi", "b c"])]
SPACE = pytest.mark.parametrize("scheme", SCHEMES)


def row_of(tokenizer, example, type="chat_template", entry=None, **keys):
    config = RunConfig.from_dict(
        {"base_model": "x", "datasets": [{"path": "x", "type": type, **(entry or {})}], **keys}
    )
    return tokenise(Dataset.from_list([example]), config.datasets[0], config, tokenizer)[0]


def shown(tokenizer, row):
    words = tokenizer.convert_ids_to_tokens(row["input_ids"])
    return [word if label == -100 else f"({word})" for word, label in zip(words, row["labels"], strict=True)]


@SPACE
@pytest.mark.parametrize("template", [TEMPLATE, LINES])
def test_chats_have_the_ids_of_the_whole_chat(scheme, template):
    tokenizer = space_tokenizer(scheme, template)
    row = row_of(tokenizer, {"messages": CHAT})
    assert row["input_ids"] == tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]


def test_labels_of_a_chat():
    tokenizer = space_tokenizer("first", TEMPLATE)
    row = row_of(tokenizer, {"messages": CHAT})
    assert shown(tokenizer, row) == [
        *["<s>", "[", "▁b", "▁", "]", "(▁c)", "(▁)", "(</s>)"],
        *["[", "▁Hi", "▁", "]", "(▁b)", "(▁c)", "(▁)", "(</s>)"],
    ]
    assert row["prompt_length"] == 12 and row["turn_spans"] == [[5, 8], [12, 16]]
    row = row_of(tokenizer, {"messages": CHAT}, entry={"train_on_eos": "none"})
    assert shown(tokenizer, row)[5:8] == ["(▁c)", "▁", "</s>"] and row["turn_spans"] == [[5, 6], [12, 14]]
    row = row_of(tokenizer, {"messages": CHAT}, train_on_inputs=True)
    assert row["labels"] == row["input_ids"]


def test_the_first_word_after_a_line_break_has_no_space():
    tokenizer = space_tokenizer("first", LINES)
    assert shown(tokenizer, row_of(tokenizer, {"messages": CHAT[:2]})) == [
        *["▁", "[", "]", "\n", "b", "</s>", "\n", "[", "]", "\n", "(c)", "(</s>)", "(\n)"]
    ]


def test_thinking_is_masked():
    tokenizer = space_tokenizer("first", TEMPLATE)
    chat = [CHAT[0], {"role": "assistant", "content": "<think>b</think>c"}]
    row = row_of(tokenizer, {"messages": chat}, ebft={"mask_thinking_ce": True})
    assert [word for word in shown(tokenizer, row) if word.startswith("(")] == ["(▁)", "(c)", "(▁)", "(</s>)"]


def test_a_tokenizer_without_offsets(monkeypatch):
    tokenizer = space_tokenizer("first", TEMPLATE)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(DataError, match="does not support offset mapping"):
        row_of(tokenizer, {"messages": CHAT})


@SPACE
def test_completions_of_texts(scheme):
    tokenizer = space_tokenizer(scheme)
    row = row_of(tokenizer, {"input": "b\n", "output": "c b"}, "ebft_strided_structured")
    assert shown(tokenizer, row)[-4:] == ["\n", "(c)", "(▁b)", "(</s>)"]


@SPACE
def test_ids_between_two_replies(scheme):
    tokenizer = space_tokenizer(scheme, LINES)
    gap = Renderer(tokenizer).conversation(CHAT[:1], "", CHAT[2:4]).turns[1].lead_ids
    whole = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    before = tokenizer("[]\nb</s>\n[]\nc", add_special_tokens=False)["input_ids"]
    assert whole == before + gap


@SPACE
@pytest.mark.parametrize("template", [TEMPLATE, LINES])
def test_references_have_the_ids_of_the_whole_chat(scheme, template):
    tokenizer = space_tokenizer(scheme, template)
    conversation = Renderer(tokenizer).conversation(CHAT[:1], "c", CHAT[2:])
    whole = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    ours = [*conversation.prompt_ids, *conversation.reference_ids]
    assert whole[: len(ours)] == ours and tokenizer.eos_token_id in whole[len(ours) :]


@SPACE
def test_a_reference_continues_a_prompt_of_text(scheme):
    tokenizer = space_tokenizer(scheme)
    shown_ids = lambda *texts: tokenizer.convert_ids_to_tokens(Renderer(tokenizer).conversation(*texts).reference_ids)
    assert shown_ids("b\n", "c b") == ["c", "▁b"] and shown_ids("b", " c") == ["▁c"]
