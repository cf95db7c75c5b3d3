"""Tokens of texts and of their parts, also for tokenizers that put a space before the first word of each text.

Such tokenizers (SentencePiece with a dummy prefix, as of Llama 2) give a text other ids on its own than inside of a
longer text. Others give the same ids, except where tokens would span the boundary.
"""

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from ebft.data.long_texts import token_ids, token_ranges
from ebft.errors import DataError

Spans = list[tuple[int, int]]  # character ranges

_SPACES = ("▁", "Ġ")  # a space in the tokens of SentencePiece and of byte-level tokenizers


class Tokens:
    """The tokens of a text without special tokens, and the characters that they cover.

    A text is tokenised as a whole, so that its tokens are those that a chat template's `tokenize=True` gives; a token
    that spans the boundary of two parts belongs to the second one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.ids: list[int] = token_ids(tokenizer, text)

    @cached_property
    def ranges(self) -> Spans:
        """The character range of each token. Raises DataError for tokenizers without offset mapping."""
        if not self.tokenizer.is_fast:
            raise DataError(
                f"{type(self.tokenizer).__name__} does not support offset mapping, so the tokens of parts of a text "
                "cannot be found. Use a fast tokenizer (one with a tokenizer.json)."
            )
        ranges, before = [], 0
        for start, end in token_ranges(self.tokenizer, self.text):
            # Some tokenizers exclude spaces from the range of a token, so that a token of spaces has an empty range.
            ranges.append((start if start < end else before, end))
            before = end
        return ranges

    def mask(self, spans: Spans) -> list[bool]:
        """For each token, whether it overlaps one of the character ranges."""
        spans = sorted(span for span in spans if span[0] < span[1])
        starts = [first for first, _ in spans]
        reach = [0, *accumulate((last for _, last in spans), max)]  # of the first spans
        return [reach[bisect_left(starts, end)] > begin for begin, end in self.ranges]

    def ranges_of(self, spans: Spans) -> list[list[int]]:
        """The tokens [start, stop) that overlap each character range; the ranges are in order and not empty.

        A token of two ranges is part of the first. Ranges without a token of their own are left out.
        """
        begins, found = [begin for begin, _ in self.ranges], []
        for first, last in spans:
            start = max(self.before(first), found[-1][1] if found else 0)
            stop = bisect_left(begins, last)
            found += [[start, stop]] if start < stop else []
        return found

    def before(self, character: int) -> int:
        """The number of tokens before the one that has the character at this index or reaches beyond it."""
        if not self.tokenizer.is_fast:
            start = token_ids(self.tokenizer, self.text[:character])
            if self.ids[: len(start)] == start:
                return len(start)
        return bisect_right(self.ranges, character, key=lambda place: place[1])


def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a space before the first word of a text."""
    first = tokenizer.convert_ids_to_tokens(token_ids(tokenizer, "x")[:1])
    return bool(first) and str(first[0]).startswith(_SPACES)


def ids_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Ids of `text` after the text `before`, without special tokens; no token spans the boundary.

    They are the ids of `text` on its own, unless the tokenizer adds a space to it.
    """
    start = _start(tokenizer, before, text)
    return token_ids(tokenizer, start + text)[len(token_ids(tokenizer, start)) :]


def mask_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str, spans: Spans) -> list[bool]:
    """For each of `ids_after`, whether it overlaps one of the character ranges of `text`."""
    start = _start(tokenizer, before, text)
    shifted = [(first + len(start), last + len(start)) for first, last in spans]
    return Tokens(tokenizer, start + text).mask(shifted)[len(token_ids(tokenizer, start)) :]


def _start(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> str:
    """The text to put before `text` when it is tokenised."""
    if not text or not adds_space(tokenizer):
        return ""
    # If tokens of the joined text span the boundary, the text is put after one that does not merge with it.
    for start in (before, "\n", "x"):
        head = token_ids(tokenizer, start)
        if start and token_ids(tokenizer, start + text)[: len(head)] == head:
            return start
    raise DataError(
        f"{type(tokenizer).__name__} adds a space to the start of texts and does not tokenise them in parts, so the "
        f"tokens of {text!r:.60} cannot be separated from those before it. Use another tokenizer."
    )
