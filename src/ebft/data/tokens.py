"""Tokens of texts and of their parts, also for tokenizers that put a space before the first word of each text.

Such tokenizers (SentencePiece with a dummy prefix, as of Llama 2) give a text other ids on its own than inside of a
longer text. Others give the same ids, except where tokens would span the boundary.
"""

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.long_texts import token_ids, token_ranges
from ebft.data.messages import content_text
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


THINKING = ("reasoning_content", "thinking", "reasoning")  # keys of messages; a chat template reads one of them
TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)


def thinking_spans(text: str) -> list[tuple[int, int]]:
    """Character ranges of the thinking blocks, in order, including tags and the whitespace after the closing tag."""
    return [(start, end) for start, end, _ in _blocks(text)]


def split_thinking(text: str) -> tuple[str, str]:
    """The thinking and the answer of a reply. Without a block, the thinking is empty and the answer is `text`."""
    blocks = _blocks(text)
    if not blocks:
        return "", text
    outside, done = [], 0
    for start, end, _ in blocks:
        outside.append(text[done:start])
        done = end
    answer = "".join([*outside, text[done:]]).lstrip()
    return "\n\n".join(thought for _, _, thought in blocks if thought), answer


def join_thinking(thinking: str, answer: str) -> str:
    """A reply that starts with its thinking, as a `<think>` block."""
    return f"<think>\n{thinking}\n</think>\n\n{answer}"


def with_thinking(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply with the thinking of its keys in its content, unless its content has thinking already."""
    content, found = content_text(reply), [reply[key] for key in THINKING if isinstance(reply.get(key), str)]
    kept = {key: value for key, value in reply.items() if key not in THINKING}
    if not found or thinking_spans(content):
        return {**kept, "content": content}
    return {**kept, "content": join_thinking(found[0], content)}


def _blocks(text: str) -> list[tuple[int, int, str]]:
    """(start, end, thought) of each block."""
    found = []
    position = 0
    headless = [
        (close, tag) for opening, tag in TAGS if (close := text.find(tag)) >= 0 and not 0 <= text.find(opening) < close
    ]
    if headless:
        close, tag = min(headless)
        if not any(0 <= text.find(opening) < close for opening, _ in TAGS):
            position = _past_space(text, close + len(tag))
            found.append((0, position, text[:close].strip()))
    while True:
        closed = [
            (start, close, opening, tag)
            for opening, tag in TAGS
            if (start := text.find(opening, position)) >= 0 and (close := text.find(tag, start + len(opening))) >= 0
        ]
        if not closed:
            return found
        start, close, opening, tag = min(closed)
        position = _past_space(text, close + len(tag))
        found.append((start, position, text[start + len(opening) : close].strip()))


def _past_space(text: str, position: int) -> int:
    return len(text) - len(text[position:].lstrip())
