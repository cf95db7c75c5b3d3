"""Tokens of texts and of their parts, also for tokenizers that put a space before the first word of each text.

Such tokenizers (SentencePiece with a dummy prefix, as of Llama 2) give a text other ids on its own than inside of a
longer text. Others give the same ids, except where tokens would span the boundary.

A long text is tokenised in windows that overlap, since the tokenizers library keeps about 200 bytes per character of a
text until all of it is tokenised. Windows are joined at a place where both have a token boundary, with equal tokens and
some thousand characters of context on either side in both. If there is no such place, the window becomes longer, in the
end the whole text. Normalisers and pre-tokenisers work on words, so that what is equal around a place is equal in the
whole text. A model without a pre-tokeniser joins tokens at any distance, but only to texts of its vocabulary: windows
are then joined at spaces, if no text of the vocabulary continues after a space.

Thinking in the text of a reply is found by its tags.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.errors import DataError

Spans = list[tuple[int, int]]  # character ranges

_SPACES = ("▁", "Ġ")  # a space in the tokens of SentencePiece and of byte-level tokenizers


class Tokens:
    """The tokens of a text without special tokens, and the characters that they cover.

    A text is tokenised as a whole, so that its tokens are those that a chat template's `tokenize=True` gives; a token
    that spans the boundary of two parts belongs to the second one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        self.tokenizer, self.text, self._encoding = tokenizer, text, None
        if len(text) > LONGEST:
            self.ids: list[int] = token_ids(tokenizer, text)
        else:  # once, for the ranges as well
            found = tokenizer(text, add_special_tokens=False, verbose=False)
            self.ids, (self._encoding, *_) = found["input_ids"], found.encodings or [None]

    @cached_property
    def ranges(self) -> Spans:
        """The character range of each token; slow tokenizers have none, and raise NotImplementedError."""
        ranges, before = [], 0
        encoding = self._encoding
        for start, end in token_ranges(self.tokenizer, self.text) if encoding is None else encoding.offsets:
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


THINKING = ("reasoning_content", "thinking", "reasoning")  # keys of messages; a chat template reads one
TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("[THINK]", "[/THINK]"),
)
TAG = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair))
_BLOCK = re.compile("|".join(rf"{re.escape(start)}(.*?){re.escape(end)}\s*" for start, end in TAGS), re.DOTALL)
_SPACE = re.compile(r"\s*")


def thinking_spans(text: str, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
    """Character ranges of the thinking blocks in `text[start:stop]`, in order.

    They include tags and the white space after the closing tag.
    """
    return [(start + first, start + last) for first, last, _ in _blocks(text[start:stop])]


def split_thinking(text: str) -> tuple[str, str]:
    """The thinking and the answer of a reply. Without a block, the thinking is empty and the answer is `text`."""
    blocks = _blocks(text)
    if not blocks:
        return "", text
    ends, starts = [0, *(end for _, end, _ in blocks)], [*(start for start, _, _ in blocks), len(text)]
    answer = "".join(text[end:start] for end, start in zip(ends, starts)).lstrip()
    return "\n\n".join(thought for _, _, thought in blocks if thought), answer


def join_thinking(thinking: str, answer: str) -> str:
    """A reply that starts with its thinking, as a `<think>` block."""
    return f"<think>\n{thinking}\n</think>\n\n{answer}"


def with_thinking(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply with the thinking of its keys in its content, unless its content has thinking already."""
    content, found = reply.get("content", ""), [reply[key] for key in THINKING if isinstance(reply.get(key), str)]
    kept = {key: value for key, value in reply.items() if key not in THINKING}
    if not found or thinking_spans(content):
        return {**kept, "content": content}
    return {**kept, "content": join_thinking(found[0], content)}


def _blocks(text: str) -> list[tuple[int, int, str]]:
    """(start, end, thought) of each block; a template may have opened the first one in the generation prompt."""
    first = TAG.search(text)
    done = 0 if first is None or first[0] not in dict(TAGS).values() else _SPACE.match(text, first.end()).end()
    found = [(0, done, text[: first.start()].strip())] if done else []
    return found + [(m.start(), m.end(), m[m.lastindex].strip()) for m in _BLOCK.finditer(text, done)]


LONGEST = 2**18  # characters that are tokenised at once, if possible
_CONTEXT = 4096  # characters of the zone in which windows are joined, and of the context on either side of it
_EQUAL = 24  # tokens on either side of the place at which windows are joined that have to be equal
_MARKS = " \n\t.,;:\"'()[]{}<>=/+*-|。，、！？；：「」（）…"  # characters that may end a word
_LINES = ("word", "字。", "!?", "का")  # ends of lines


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text without special tokens."""
    if len(text) <= LONGEST:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    known = list(range(len(tokenizer)))  # one object for each id, instead of one for each token
    return [known[token] if token < len(known) else token for ids, _ in _parts(tokenizer, text) for token in ids]


def token_ranges(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, int]]:
    """The characters of each of `token_ids`, for a fast tokenizer."""
    if len(text) <= LONGEST:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return found["offset_mapping"]
    return [found for _, ranges in _parts(tokenizer, text, with_ranges=True) for found in ranges]


class _Window:
    """The tokens of the characters [start, stop) of a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, start: int, stop: int) -> None:
        self.start, self.stop = start, min(stop, len(text))
        found = tokenizer(text[start : self.stop], add_special_tokens=False, verbose=False)
        self.ids: list[int] = found["input_ids"]
        self._encoding = found.encodings[0] if found.encodings else None

    def part(self, first: int, last: int | None, with_ranges: bool) -> tuple[list[int], list[tuple[int, int]]]:
        offsets = self._encoding.offsets[first:last] if with_ranges else []
        return self.ids[first:last], [(self.start + begin, self.start + end) for begin, end in offsets]

    def before(self, place: int) -> int | None:
        """The number of tokens before a character; None if there is no token boundary."""
        index = self._encoding.char_to_token(place - 1 - self.start)
        if index is None:
            return None
        while True:
            _, end = self._encoding.token_to_chars(index) or (0, 0)
            index += 1
            after = self._encoding.token_to_chars(index) if index < len(self.ids) else None
            if after is None or after[0] + self.start >= place:
                return index if end + self.start == place else None


def _parts(
    tokenizer: PreTrainedTokenizerBase, text: str, with_ranges: bool = False
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Ids, and with `with_ranges` the characters, of the parts of a text in order."""
    places = _places_of(tokenizer)
    window, first = _Window(tokenizer, text, 0, len(text) if places is None else LONGEST), 0
    while window.stop < len(text):
        start = window.stop - 3 * _CONTEXT
        following = _Window(tokenizer, text, start, start + LONGEST)
        joined = _joined(window, following, places, text)
        if joined is None:
            longer = _Window(tokenizer, text, window.start, 2 * window.stop - window.start)
            known = window.ids[: first + _EQUAL]
            if longer.ids[: len(known)] != known:
                raise DataError(
                    f"{type(tokenizer).__name__} cannot tokenise a text of {len(text):,} characters in parts, since "
                    "its tokens depend on distant ones. Split the row into several."
                )
            window = longer
            continue
        yield window.part(first, joined[0], with_ranges)
        window, first = following, joined[1]
    yield window.part(first, None, with_ranges)


def _joined(left: _Window, right: _Window, places: re.Pattern[str], text: str) -> tuple[int, int] | None:
    """The numbers of tokens of both windows before the place at which they are joined; None if there is none."""
    for found in places.finditer(text, right.start + _CONTEXT, right.start + 2 * _CONTEXT):
        last, first = left.before(found.start()), right.before(found.start())
        if last is None or first is None or min(last, first) < _EQUAL:
            continue
        if left.ids[last - _EQUAL : last + _EQUAL] == right.ids[first - _EQUAL : first + _EQUAL]:
            return last, first
    return None


@lru_cache(maxsize=4)
def _places_of(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """The places at which windows may be joined; None if texts have to be tokenised at once."""
    if not tokenizer.is_fast or max(map(len, tokenizer.get_added_vocab()), default=0) > _CONTEXT // 4:
        return None
    backend = tokenizer.backend_tokenizer
    if backend.pre_tokenizer is not None and b'"FixedLength"' in backend.pre_tokenizer.__getstate__():
        return None  # its words depend on the position
    ends = "".join(mark for mark in _MARKS if _splits_at(mark, backend))
    if ends:
        lines = r"|(?<=\S)(?=\n)" if all(_splits_at("\n", backend, word) for word in _LINES) else ""
        return re.compile(rf"(?<=[^\W_])(?=[{re.escape(ends)}]){lines}")
    model = json.loads(backend.to_str())["model"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return None  # the best tokens of a whole text, whose scores are rounded, or random ones
    crosses = re.compile(r"[^\s▁Ġ][\s▁Ġ]")
    vocabulary = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    return None if any(map(crosses.search, vocabulary)) else re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")


def _splits_at(mark: str, tokenizer: Any, word: str = "word") -> bool:
    """Whether the pre-tokeniser of a tokenizer splits words that are separated by a character."""
    text = mark.join([word] * 4)
    text = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    pieces = [] if tokenizer.pre_tokenizer is None else tokenizer.pre_tokenizer.pre_tokenize_str(text)
    last = word[-1]  # a normaliser may put spaces into the word
    is_split = len(pieces) > 1 and all(text[start:end].count(last) <= 1 for _, (start, end) in pieces)
    return is_split and text.count(last) == 4
