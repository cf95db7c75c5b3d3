"""Token ids of texts that continue other texts, for tokenizers that put a space before the first word of each text.

Such tokenizers (SentencePiece with a dummy prefix, as of Llama 2) give a text other ids on its own than inside of a
longer text. Others give the same ids, except where tokens would span the boundary.
"""

from transformers import PreTrainedTokenizerBase

from ebft.data.thinking import token_mask
from ebft.errors import DataError

_SPACES = ("▁", "Ġ")  # a space in the tokens of SentencePiece and of byte-level tokenizers


def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a space before the first word of a text."""
    first = tokenizer.convert_ids_to_tokens(_ids(tokenizer, "x")[:1])
    return bool(first) and str(first[0]).startswith(_SPACES)


def ids_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Ids of `text` after the text `before`, without special tokens; no token spans the boundary.

    They are the ids of `text` on its own, unless the tokenizer adds a space to it.
    """
    start = _start(tokenizer, before, text)
    return _ids(tokenizer, start + text)[len(_ids(tokenizer, start)) :]


def mask_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str, spans: list[tuple[int, int]]) -> list[bool]:
    """For each of `ids_after`, whether it overlaps one of the character ranges of `text`."""
    start = _start(tokenizer, before, text)
    shifted = [(first + len(start), last + len(start)) for first, last in spans]
    return token_mask(tokenizer, start + text, shifted)[len(_ids(tokenizer, start)) :]


def _start(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> str:
    """The text to put before `text` when it is tokenised."""
    if not text or not adds_space(tokenizer):
        return ""
    # If tokens of the joined text span the boundary, the text is put after one that does not merge with it.
    for start in (before, "\n", "x"):
        head = _ids(tokenizer, start)
        if start and _ids(tokenizer, start + text)[: len(head)] == head:
            return start
    raise DataError(
        f"{type(tokenizer).__name__} adds a space to the start of texts and does not tokenise them in parts, so the "
        f"tokens of {text!r:.60} cannot be separated from those before it. Use another tokenizer."
    )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
