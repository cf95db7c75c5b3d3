"""Thinking blocks of a reply: their positions and contents.

A block is `<think>...</think>` or one of the variants in `TAGS`. A tag that is never closed is ignored. In a reply with
only a closing tag, the block begins at the start: the chat templates of some models put the opening tag into the
prompt.
"""

from typing import Any

from ebft.data.messages import content_text

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
