"""Special tokens, tokens that can end a turn, and markers of chat formats that a tokenizer splits."""

import pytest

from ebft.data.conversation import Renderer
from ebft.data.rendering import split_markers
from ebft.data.tokens import end_tokens, special_texts
from tests.data.space_tokenizers import SCHEMES, space_tokenizer
from tests.structured.conftest import make_chat_tokenizer


@pytest.mark.parametrize(("text", "markers"), [
    ("<|im_start|>user\nHi<|im_end|>\n<|pad|>", []),  # tokens of the vocabulary
    ("<|user|>\nHi<|end|><|user|>", ["<|user|>", "<|end|>"]),
    ("<｜User｜>Hi<start_of_turn></end_of_turn>", ["<｜User｜>", "<start_of_turn>", "</end_of_turn>"]),
    ("<s>[INST] Hi[/INST][SYSTEM_PROMPT]</s>", ["<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "</s>"]),
    ("<s>[INST] Hi [/INST]", ["<s>"]),  # Llama 2 and Mistral v1, which write it as text
    ("### Instruction:\nHi\n\n### Response:\n", []),
    ("[USER]: <b>Hi</b> <think>\n</think> a < b | c > d [x] <|", []),
])  # fmt: skip
def test_markers_that_are_split(text, markers):
    assert split_markers(make_chat_tokenizer(), text) == markers


@pytest.mark.parametrize("scheme", SCHEMES)
def test_added_tokens_are_not_split(scheme):
    for special in (True, False):
        tokenizer = space_tokenizer(scheme)
        assert split_markers(tokenizer, "<|user|>") == ["<|user|>"]
        tokenizer.add_tokens(["<|user|>"], special_tokens=special)
        assert split_markers(tokenizer, "<|user|>") == []


def test_special_tokens_without_a_name_count():
    tokenizer = make_chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.add_tokens(["<think>"])
    assert set(tokenizer.all_special_tokens) == {"<|pad|>", "<|endoftext|>", "<|begin|>"}
    special = {"<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"}
    assert sorted(special_texts(tokenizer)) == sorted(special)
    assert end_tokens(tokenizer) == set(tokenizer.convert_tokens_to_ids([*special, "<think>"]))


def test_white_space_and_unknown_text_end_no_turn():
    tokenizer = make_chat_tokenizer()
    tokenizer.add_tokens(["\n", "\n\n"])
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    assert not end_tokens(tokenizer) & set(tokenizer.convert_tokens_to_ids(["\n", "\n\n", "<unk>"]))
    tokenizer.unk_token = tokenizer.eos_token  # as of GPT-2
    assert tokenizer.eos_token_id in end_tokens(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert Renderer(tokenizer).template.end_of_turn == "\n" and Renderer(tokenizer).template.end_of_turn_id is None
