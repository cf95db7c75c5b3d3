"""Metrics of translations and of sets of samples: chrF of a line, corpus BLEU and chrF, and how samples differ."""

import itertools
import re
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

_CHRF = CHRF()


def line(completion: str) -> str:
    """The translation that a completion gives: its first line."""
    return completion.strip(" ").partition("\n")[0].strip()


def chrf(prompt: str, completions: list[str], row: dict[str, Any]) -> float:
    """Sentence chrF of a completion's first line against the reference, from 0 to 1."""
    return similarity(line(completions[0]), line(row["output"]))


def similarity(text: str, other: str) -> float:
    """Sentence chrF of one text against another, from 0 to 1; that of two empty ones is 1."""
    if text == other:
        return 1.0
    return _CHRF.sentence_score(text, [other]).score / 100


def corpus_scores(texts: list[str], references: list[str]) -> dict[str, float]:
    """Corpus BLEU and chrF of translations, from 0 to 1: no means of sentences, so they have no interval."""
    return {
        "corpus_bleu": BLEU().corpus_score(texts, [references]).score / 100,
        "corpus_chrf": _CHRF.corpus_score(texts, [references]).score / 100,
    }


def spread(texts: list[str]) -> dict[str, float]:
    """How the samples of one prompt differ: mean of 1 - chrF over pairs, share of distinct texts, and distinct-2."""
    pairs = list(itertools.permutations(texts, 2))
    return {
        "pair_distance": sum(1 - similarity(one, other) for one, other in pairs) / len(pairs),
        "distinct": (len(set(texts)) - 1) / (len(texts) - 1),
        "distinct_2": distinct_bigrams(texts),
    }


def distinct_bigrams(texts: list[str]) -> float:
    """Share of distinct pairs of adjacent words (or signs) among all pairs; 0 where there is none."""
    words = [re.findall(r"\w+|[^\w\s]", text) for text in texts]
    bigrams = [pair for of_text in words for pair in itertools.pairwise(of_text)]
    return len(set(bigrams)) / len(bigrams) if bigrams else 0.0
