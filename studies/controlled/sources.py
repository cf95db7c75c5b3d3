"""The sources of the study; the tiny quickstart has `Brackets` and `Moved`, and what every source can do.

A new source is a class with the members of `Source`, and a line in SOURCES.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence

from ebft.examples.quickstart.brackets import END, Brackets, Moved, Moves, Source, along, first_error


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
