"""Tokens of long texts: the text is tokenised in parts, whose tokens are those of the whole text.

The tokenizers library keeps about 200 bytes per character of a text until all of it is tokenised. A long text is
therefore tokenised in windows that overlap. They are joined at a place where both have a token boundary, with equal
tokens and some thousand characters of context on either side in both. If there is no such place, the window becomes
longer, in the end the whole text. Normalisers and pre-tokenisers work on words, so that what is equal around a place is
equal in the whole text. A model without a pre-tokeniser joins tokens at any distance, but only to texts of its
vocabulary: windows are then joined at spaces, if no text of the vocabulary continues after a space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from ebft.errors import DataError
from ebft.machine import memory_bytes

LONGEST = 2**18  # characters that are tokenised at once, if possible
_CONTEXT = 4096  # characters of the zone in which windows are joined, and of the context on either side of it
_EQUAL = 24  # tokens on either side of the place at which windows are joined that have to be equal
_BYTES = 130  # at least, of memory per character that is tokenised at once; measured: 130 to 200
_MARKS = " \n\t.,;:\"'()[]{}<>=/+*-|。，、！？；：「」（）…"  # characters that may end a word
_LINES = ("word", "字。", "!?", "का")  # ends of lines
_places: WeakKeyDictionary[object, re.Pattern[str] | None] = WeakKeyDictionary()


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
        _check_memory(self.stop - start)
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


def _places_of(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """The places at which windows may be joined; None if texts have to be tokenised at once."""
    if not tokenizer.is_fast:
        return None
    if tokenizer not in _places:
        _places[tokenizer] = _find_places(tokenizer)
    return _places[tokenizer]


def _find_places(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    if max(map(len, tokenizer.get_added_vocab()), default=0) > _CONTEXT // 4:
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


def _check_memory(characters: int) -> None:
    """Raise DataError if tokenising so many characters at once needs more memory than there is."""
    memory = memory_bytes()
    if memory is not None and characters * _BYTES > memory:
        raise DataError(
            f"{characters:,} characters have to be tokenised at once, since there are no words at whose ends this "
            f"tokenizer allows to split them. This needs more than {characters * _BYTES / 2**30:,.0f} GiB of memory; "
            f"this machine has {memory / 2**30:,.0f} GiB. Split the row into several, or remove it."
        )
