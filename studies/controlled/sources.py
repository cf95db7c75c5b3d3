"""Texts whose distribution is known: each next word has a computable probability, so a sample can be judged exactly.

A source is a start state and `moves`: from a state, each possible next word with its probability and the next state. A
word that is not among them is an error. A new source is a class with the members of `Source`, and a line in SOURCES.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

END = "</s>"
Moves = dict[str, tuple[float, Hashable]]


class Source(Protocol):
    """A distribution over texts, given word by word."""

    words: list[str]  # all but END
    start: Hashable

    def moves(self, state: Hashable) -> Moves:
        """The next words, END among them where a text can end: probability and next state. The sum is 1."""

    def mode(self, text: Sequence[str]) -> Hashable:
        """The class of a valid text, for coverage: how often each class is sampled is compared with its probability."""


class Brackets:
    """Nested brackets of twelve kinds: each closes with its own name, however far its opening is."""

    kinds, fillers, deepest, longest = "abcdefghijkl", 24, 6, 48
    start = ((), 0)  # open brackets, words so far
    seed = 0  # of the shares of kinds and words

    def __init__(self) -> None:
        self.words = [f"{side}{kind}" for side in "()" for kind in self.kinds]
        self.words += [f"w{number}" for number in range(self.fillers)]
        self._kinds = {kind: zipf(self.kinds, self.seed + seed) for seed, kind in enumerate(("", *self.kinds))}
        names = self.words[2 * len(self.kinds) :]
        self._fillers = {kind: zipf(names, self.seed + 100 + seed) for seed, kind in enumerate(self.kinds)}

    def moves(self, state: Hashable) -> Moves:
        opened, count = state
        top = opened[-1] if opened else ""
        may_open = len(opened) < self.deepest and count + len(opened) < self.longest
        if not opened:
            chances = {"open": 1.0} if not count else {"open": 0.5, "end": 0.5} if may_open else {"end": 1.0}
        elif may_open:
            chances = {"open": 0.2, "close": 0.3, "word": 0.5}
        elif count + len(opened) < self.longest:
            chances = {"close": 0.5, "word": 0.5}
        else:
            chances = {"close": 1.0}
        found: Moves = {}
        for kind, share in self._kinds[top].items() if "open" in chances else ():
            found[f"({kind}"] = (chances["open"] * share, ((*opened, kind), count + 1))
        for word, share in self._fillers[top].items() if "word" in chances else ():
            found[word] = (chances["word"] * share, (opened, count + 1))
        if "close" in chances:
            found[f"){top}"] = (chances["close"], (opened[:-1], count + 1))
        return found | ({END: (chances["end"], None)} if "end" in chances else {})

    def mode(self, text: Sequence[str]) -> Hashable:
        """The kind of the first bracket, and how deep the brackets are nested."""
        depths = itertools.accumulate(1 if word[0] == "(" else -1 if word[0] == ")" else 0 for word in text)
        return text[0], max(depths)


class Moved(Brackets):
    """Brackets with other shares of kinds and words: the start knows Brackets."""

    seed = 1000


class Traces:
    """Programs of one variable modulo 5 and what they print: a printed digit follows from all that is before it."""

    words = ["set", "add", "mul", "sub", "show", *"01234"]
    start = ("set", 0, 0, 0)  # what comes next, value, operations since the last print, prints
    modulus, longest, silent = 5, 8, 2

    def moves(self, state: Hashable) -> Moves:
        due, value, silent, shown = state
        digits = range(self.modulus)
        if due == "set":
            return {"set": (1.0, ("=", value, silent, shown))}
        if due == "=":
            return {str(digit): (1 / self.modulus, ("op", digit, 0, shown)) for digit in digits}
        if due == "print":
            return {str(value): (1.0, ("op", value, 0, shown + 1))}
        if due in ("add", "mul", "sub"):
            results = {"add": lambda d: value + d, "sub": lambda d: value - d, "mul": lambda d: value * d}[due]
            chance = 1 / (self.modulus - 1)
            return {str(d): (chance, ("op", results(d) % self.modulus, silent + 1, shown)) for d in digits[1:]}
        last = silent == 0 and shown > 0
        if last and shown >= self.longest:
            return {END: (1.0, None)}
        show = 0.0 if silent == 0 else 1.0 if silent >= self.silent else 0.8
        end = 0.25 if last else 0.0
        shares = {"add": 0.5, "sub": 0.3, "mul": 0.2}
        found: Moves = {op: ((1 - show - end) * share, (op, value, silent, shown)) for op, share in shares.items()}
        found |= {"show": (show, ("print", value, silent, shown)), END: (end, None)}
        return {word: move for word, move in found.items() if move[0]}

    def mode(self, text: Sequence[str]) -> Hashable:
        """The first digit and the number of prints."""
        return text[1], sum(word == "show" for word in text)


class Sentences:
    """A mixture of 400 fixed sentences of 12 to 20 words, the rarest 1,500 times as rare as the most frequent one."""

    count, rate = 400, 1.22
    start = ()

    def __init__(self) -> None:
        self.words = [f"v{number}" for number in range(40)]
        chooser = random.Random(7)
        texts = [tuple(chooser.choices(self.words, k=chooser.randint(12, 20))) for _ in range(self.count)]
        weights = [rank**-self.rate for rank in range(1, self.count + 1)]
        self._next: dict[Hashable, dict[str, float]] = {}
        for text, weight in zip(texts, weights):
            for place in range(len(text) + 1):
                word = text[place] if place < len(text) else END
                chances = self._next.setdefault(text[:place], {})
                chances[word] = chances.get(word, 0.0) + weight

    def moves(self, state: Hashable) -> Moves:
        chances = self._next[state]
        total = sum(chances.values())
        return {word: (share / total, (*state, word)) for word, share in chances.items()}

    def mode(self, text: Sequence[str]) -> Hashable:
        """The sentence itself."""
        return tuple(text)


SOURCES: dict[str, type[Source]] = {"brackets": Brackets, "traces": Traces, "sentences": Sentences}
SOURCES |= {"moved": Moved, "shifted": Moved}
BEFORE: dict[str, type[Source]] = {"moved": Brackets, "shifted": Brackets}  # what the start has learned
FEW = {"moved": 200}  # the number of training texts, where they are repeated


def zipf(names: Sequence[str], seed: int) -> dict[str, float]:
    """Shares 1, 1/2, 1/3, ... of names in an order of their own."""
    order = random.Random(seed).sample(list(names), len(names))
    total = sum(1 / rank for rank in range(1, len(order) + 1))
    return {name: 1 / rank / total for rank, name in enumerate(order, 1)}


def draw(source: Source, seed: int, count: int) -> list[list[str]]:
    """`count` texts of the source, without END."""
    chooser, texts = random.Random(seed), []
    for _ in range(count):
        text: list[str] = []
        state = source.start
        while True:
            moves = source.moves(state)
            word = chooser.choices(list(moves), [chance for chance, _ in moves.values()])[0]
            if word == END:
                break
            text.append(word)
            state = moves[word][1]
        texts.append(text)
    return texts


def along(source: Source, text: Sequence[str]) -> Iterator[Moves]:
    """The moves before each word of `text` and after its last one, up to the first word that is an error."""
    state = source.start
    for word in (*text, END):
        moves = source.moves(state)
        yield moves
        if word not in moves:
            return
        state = moves[word][1]


def first_error(source: Source, text: Sequence[str]) -> int | None:
    """The index of the first word that the source never has there, len(text) for an end; None for a valid text."""
    moves = list(along(source, text))
    last = (*text, END)[len(moves) - 1]
    return None if last in moves[-1] else len(moves) - 1


def log_probability(source: Source, text: Sequence[str]) -> float:
    """The log-probability of a whole text in nats, its end included; -inf for one with an error."""
    if first_error(source, text) is not None:
        return -math.inf
    return sum(math.log(moves[word][0]) for moves, word in zip(along(source, text), (*text, END)))


def is_valid(completions: list[str], source: list[str], **columns: object) -> list[float]:
    """The reward of RLVR: 1 for a text without an error. `source` is a column of the rows."""
    return [float(first_error(SOURCES[name](), text.split()) is None) for text, name in zip(completions, source)]


def prompts(cfg: object, **options: object) -> tuple[object, dict[str, object]]:
    """The rows as prompts for RLVR, with the name of their source for `is_valid`."""
    as_prompt = lambda row, tokenizer=None: {"prompt": row["input"], "ground_truth": row["output"]}
    return as_prompt, {"remove_columns": ["input", "output"]}
