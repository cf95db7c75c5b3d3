"""Which tokens of a tokenizer are special, and which can end a turn."""

from transformers import PreTrainedTokenizerBase


def special_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of all special tokens: `all_special_tokens` lacks those that the tokenizer gives no name."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that can end a turn: special ones, and those that are added with `tokens`, which are not special.

    White space cannot, although some vocabularies have it as added tokens (Gemma), nor can unknown text.
    """
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    found = {*tokenizer.convert_tokens_to_ids(special_texts(tokenizer)), *added}
    return found - {tokenizer.unk_token_id} | ({tokenizer.eos_token_id} & found)
