"""Thinking blocks of a reply: their positions, contents and tokens.

A block is `<think>...</think>` or one of the variants in `TAGS`. A tag that is never closed is ignored. In a reply with
only a closing tag, the block begins at the start: the chat templates of some models put the opening tag into the
prompt.
"""

from bisect import bisect_left, bisect_right

from transformers import PreTrainedTokenizerBase

from ebft.errors import DataError

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


def token_mask(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]) -> list[bool]:
    """For each token of `text`, without special tokens, whether it overlaps one of the character ranges."""
    tokens = _token_characters(tokenizer, text)
    return [any(begin < last and end > first for first, last in spans) for begin, end in tokens]


def token_ranges(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]) -> list[list[int]]:
    """The tokens [start, end) of `text` that overlap each character range; the ranges are in order and not empty.

    A token of two ranges is part of the first. Ranges without a token of their own are left out.
    """
    begins, ends = zip(*_token_characters(tokenizer, text)) if text else ((), ())
    found: list[list[int]] = []
    for first, last in spans:
        start = max(bisect_right(ends, first), found[-1][1] if found else 0)
        stop = bisect_left(begins, last)
        found += [[start, stop]] if start < stop else []
    return found


def _token_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, int]]:
    """The character range of each token of `text`, without special tokens."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not support offset mapping, so the tokens of thinking blocks and "
            "of parts of a turn cannot be found. Use a fast tokenizer (one with a tokenizer.json), or remove "
            "ebft.mask_thinking_ce, train_on_eos and roles_to_train."
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    found, before = [], 0
    for start, end in encoded["offset_mapping"]:
        # Some tokenizers exclude spaces from the range of a token, so that a token of only spaces has an empty range.
        found.append((start if start < end else before, end))
        before = end
    return found


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
