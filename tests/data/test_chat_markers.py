"""Markers of chat formats that a tokenizer splits."""

import pytest

from ebft.data.rendering import split_by_template, split_markers
from ebft.errors import ModelError
from tests.data.space_tokenizers import SCHEMES, space_tokenizer
from tests.structured.conftest import make_chat_tokenizer


@pytest.mark.parametrize(
    ("text", "markers"),
    [
        ("<|im_start|>user\nHi<|im_end|>\n<|pad|>", []),  # tokens of the vocabulary
        ("<|user|>\nHi<|end|><|user|>", ["<|user|>", "<|end|>"]),
        ("<｜User｜>Hi<start_of_turn></end_of_turn>", ["<｜User｜>", "<start_of_turn>", "</end_of_turn>"]),
        ("<s>[INST] Hi[/INST][SYSTEM_PROMPT]</s>", ["<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "</s>"]),
        ("<s>[INST] Hi [/INST]", ["<s>"]),  # Llama 2 and Mistral v1, which write it as text
        ("### Instruction:\nHi\n\n### Response:\n", []),
        ("[USER]: <b>Hi</b> <think>\n</think> a < b | c > d [x] <|", []),
    ],
)
def test_markers_that_are_split(text, markers):
    assert split_markers(make_chat_tokenizer(), text) == markers


@pytest.mark.parametrize("key", ["additional_special_tokens", "tokens"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_added_tokens_are_not_split(scheme, key):
    tokenizer = space_tokenizer(scheme)
    assert split_markers(tokenizer, "<|user|>") == ["<|user|>"]
    if key == "tokens":
        tokenizer.add_tokens(["<|user|>"])
    else:
        tokenizer.add_special_tokens({key: ["<|user|>"]})
    assert split_markers(tokenizer, "<|user|>") == []


def test_the_markers_of_a_template():
    tokenizer = make_chat_tokenizer()
    assert split_by_template(tokenizer) == []
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}<|system|>{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|reply|>{% elif messages[-1].role == 'assistant' %}<|done|>{% endif %}"
    )
    assert set(split_by_template(tokenizer)) == {"<|system|>", "<|reply|>", "<|done|>"}
    tokenizer.chat_template = None
    assert split_by_template(tokenizer) == []


def test_a_template_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("ebft.data.rendering._SECONDS", 0.2)
    tokenizer = make_chat_tokenizer()
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ModelError, match=r"chat_template: .* takes more than 0.2 s"):
        split_by_template(tokenizer)
