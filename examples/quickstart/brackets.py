"""Texts whose distribution is known: each next word has a computable probability, so a model is judged exactly.

A source is a start state and `moves`: from a state, each possible next word with its probability and the next state. A
word that is not among them is an error.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "</s>"
PROMPT = "go"  # of every text
LONGEST, BATCH = 80, 250  # words of a sample; texts that are measured at once
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
    """Brackets with other shares of kinds and words."""

    seed = 1000


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


def write_texts(path: Path, texts: list[list[str]], **columns: str) -> None:
    """Rows of training: the prompt, the text and `columns`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"input": PROMPT, "output": " " + " ".join(text), **columns} for text in texts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_random_model(folder: Path, words: list[str], shape: dict[str, int]) -> None:
    """A random Llama model whose tokens are the words of a source."""
    vocabulary = {word: number for number, word in enumerate(("<pad>", "<unk>", END, PROMPT, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"eos_token": END, "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    tokens = {"vocab_size": len(vocabulary), "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    config = LlamaConfig(**tokens, **shape, max_position_embeddings=128, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)


def ids_of(tokenizer: Any, source: Source) -> dict[str, int]:
    """The tokens of the words of a source, of the prompt and of the end."""
    return {word: tokenizer.convert_tokens_to_ids(word) for word in (PROMPT, END, *source.words)}


@torch.inference_mode()
def kl(
    model: Any, ids: dict[str, int], source: Source, texts: list[list[str]], temperatures: Sequence[float] = (1.0,)
) -> dict[float, list[float]]:
    """KL(source || model) of each text, the shortest first, in nats, for every sampling temperature. It is summed over
    the next words, so that only the choice of the texts is random."""
    found: dict[float, list[float]] = {temperature: [] for temperature in temperatures}
    texts = sorted(texts, key=len)
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        longest = len(batch[-1]) + 1
        truth = torch.zeros(len(batch), longest, model.config.vocab_size)
        rows = torch.full((len(batch), longest), ids[END])
        for row, text in enumerate(batch):
            rows[row, : len(text) + 1] = torch.tensor([ids[word] for word in (PROMPT, *text)])
            for place, moves in enumerate(along(source, text)):
                for word, (chance, _) in moves.items():
                    truth[row, place, ids[word]] = chance
        logits = model(input_ids=rows).logits.float()
        for temperature in temperatures:
            logps = (logits / temperature).log_softmax(-1)
            entropies = torch.special.entr(truth).sum((1, 2))
            found[temperature] += (-(truth * logps).sum((1, 2)) - entropies).tolist()
    return found


@torch.inference_mode()
def sampled(model: Any, ids: dict[str, int], count: int, temperature: float = 1.0) -> list[list[str]]:
    """`count` texts of the model, without END; one that does not end has LONGEST words."""
    torch.manual_seed(0)
    words = {number: word for word, number in ids.items()}
    options = GenerationConfig(
        do_sample=True, top_k=0, temperature=temperature, max_new_tokens=LONGEST, eos_token_id=ids[END], pad_token_id=0
    )
    texts = []
    for place in range(0, count, BATCH):
        prompts = torch.full((min(BATCH, count - place), 1), ids[PROMPT])
        rows: Tensor = model.generate(prompts, generation_config=options)
        for row in rows[:, 1:].tolist():
            ended = row.index(ids[END]) if ids[END] in row else len(row)
            texts.append([words.get(token, "?") for token in row[:ended]])
    return texts
