"""What is shown of a row: parts of tokens with their labels, and the blocks of a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ebft.data.transforms.rows import IGNORE

LONGEST_RUN = 200  # characters of a run that are shown; all of its tokens are in those of the part


@dataclass(frozen=True)
class Token:
    """A token: `label` is its id if it is in the cross-entropy, else -100; `anchor` is its position if it is one."""

    id: int
    text: str  # printable
    label: int
    special: bool
    anchor: int | None = None


@dataclass(frozen=True)
class Block:
    """A block of a document: its anchor, the text before it, and its reference."""

    anchor: int
    context: str
    reference: str


class Run(NamedTuple):
    """Consecutive tokens of a part, from position `start` to before `stop`, with the same role."""

    role: str
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """A sequence of tokens with its title, facts about it as (name, value), and the roles of its tokens."""

    title: str
    tokens: list[Token]
    facts: list[tuple[str, str]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    roles: list[Run] = field(default_factory=list)

    def text(self, run: Run) -> str:
        """The text of a run, shortened in its middle."""
        text = "".join(token.text for token in self.tokens[run.start : run.stop])
        return text if len(text) <= LONGEST_RUN else f"{text[: LONGEST_RUN // 2]} ... {text[-LONGEST_RUN // 2 :]}"


@dataclass(frozen=True)
class RowView:
    """A row: its parts in order, and its other columns as (name, value)."""

    parts: list[Part]
    columns: list[tuple[str, str]] = field(default_factory=list)


class TokenTexts:
    """Converts token ids to tokens with printable texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.special = {*tokenizer.all_special_ids, *added}

    def tokens(self, ids: Sequence[int], learned: Iterable[bool], anchors: Iterable[int] = ()) -> list[Token]:
        """The tokens `ids`, of which those that are `learned` have a label; `anchors` are positions."""
        starts = set(anchors)
        return [
            Token(
                id=token,
                text=text,
                label=token if is_learned else IGNORE,
                special=token in self.special,
                anchor=position if position in starts else None,
            )
            for position, (token, text, is_learned) in enumerate(zip(ids, self.texts(ids), learned, strict=True))
        ]

    def joined(self, ids: Sequence[int]) -> str:
        """The text of consecutive tokens."""
        return printable(self._decode(list(ids)))

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token with its leading space; the tokenizer's own spelling if it is part of a character."""
        alone = [self._decode([token]) for token in ids]
        texts = alone[:1]
        for index in range(1, len(ids)):
            # Some tokenizers drop the space before the first token that they decode.
            pair = self._decode([ids[index - 1], ids[index]])
            texts.append(pair.removeprefix(alone[index - 1]) if pair.startswith(alone[index - 1]) else alone[index])
        spelled = self.tokenizer.convert_ids_to_tokens(list(ids))
        return [printable(name if "\ufffd" in text else text) for text, name in zip(texts, spelled)]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def printable(value: Any) -> str:
    """A value as text on one line, with escapes for control characters."""
    text = value if isinstance(value, str) else repr(value)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def counted(tokens: list[Token]) -> tuple[str, str]:
    """The number of tokens that have a label, as a fact."""
    return "in the cross-entropy", f"{sum(token.label != IGNORE for token in tokens):,} of {len(tokens):,} tokens"
