"""Special tokens of a tokenizer, and markers of chat formats that are not tokens of its vocabulary."""

import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

# <|im_start|>, <｜User｜>, <start_of_turn>, <s>, [INST]. Words in angle brackets, such as <think>, are plain text.
_MARKER = re.compile(r"<[|｜][^<>\s]+?[|｜]>|</?[A-Za-z]+(?:_[A-Za-z]+)+>|</?s>|\[/?[A-Z]+(?:_[A-Z]+)*\]")
# Llama 2 and Mistral v1 write [INST] as text, with a space before the closing one; the others have tokens for it.
_AS_TEXT = " [/INST]"


def special_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of all special tokens: `all_special_tokens` lacks those that the tokenizer gives no name."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that can end a turn: special ones, and those that are added with `tokens`, which are not special."""
    return {*tokenizer.convert_tokens_to_ids(special_texts(tokenizer)), *tokenizer.added_tokens_decoder}


def split_markers(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The markers of chat formats in `text` that the tokenizer splits into several tokens, or does not know."""
    found = dict.fromkeys(_MARKER.findall(text))
    if _AS_TEXT in text:
        found = {marker: None for marker in found if not marker.startswith("[")}
    return [marker for marker in found if _is_split(tokenizer, marker)]


def _is_split(tokenizer: PreTrainedTokenizerBase, marker: str) -> bool:
    ids = tokenizer(marker, add_special_tokens=False, verbose=False)["input_ids"]
    own = tokenizer.convert_tokens_to_ids(marker)  # may follow a space that the tokenizer adds
    if own is not None and own != tokenizer.unk_token_id and own in ids:
        return False
    return len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and marker != tokenizer.unk_token)


def advice(markers: Iterable[str], with_adapter: bool) -> str:
    """What a warning of split markers suggests."""
    names = ", ".join(f'"{marker}"' for marker in markers)
    trained = "; with an adapter, also set lora_modules_to_save: [embed_tokens, lm_head], so that they are trained"
    return (
        f"Add them with tokens: [{names}], or with special_tokens.additional_special_tokens"
        f"{trained if with_adapter else ''}."
    )
