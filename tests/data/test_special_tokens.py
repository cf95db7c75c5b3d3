"""Special tokens, and tokens that can end a turn."""

from ebft.data.special_tokens import end_tokens, special_texts
from tests.structured.conftest import make_chat_tokenizer


def test_special_tokens_without_a_name_count():
    tokenizer = make_chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.add_tokens(["<think>"])
    assert set(tokenizer.all_special_tokens) == {"<|pad|>", "<|endoftext|>", "<|begin|>"}
    special = {"<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"}
    assert set(special_texts(tokenizer)) == special and len(special_texts(tokenizer)) == 5
    assert end_tokens(tokenizer) == set(tokenizer.convert_tokens_to_ids([*special, "<think>"]))
