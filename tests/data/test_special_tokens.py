"""Special tokens, and tokens that can end a turn."""

from ebft.data.conversation import Renderer
from ebft.data.tokens import end_tokens, special_texts
from tests.structured.conftest import make_chat_tokenizer


def test_special_tokens_without_a_name_count():
    tokenizer = make_chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.add_tokens(["<think>"])
    assert set(tokenizer.all_special_tokens) == {"<|pad|>", "<|endoftext|>", "<|begin|>"}
    special = {"<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"}
    assert set(special_texts(tokenizer)) == special and len(special_texts(tokenizer)) == 5
    assert end_tokens(tokenizer) == set(tokenizer.convert_tokens_to_ids([*special, "<think>"]))


def test_white_space_and_unknown_text_end_no_turn():
    tokenizer = make_chat_tokenizer()
    tokenizer.add_tokens(["\n", "\n\n"])
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    before = end_tokens(tokenizer)
    assert not before & set(tokenizer.convert_tokens_to_ids(["\n", "\n\n", "<unk>"]))
    tokenizer.unk_token = tokenizer.eos_token  # as of GPT-2
    assert tokenizer.eos_token_id in end_tokens(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert Renderer(tokenizer).template.end_of_turn == "\n" and Renderer(tokenizer).end_of_turn_id is None
