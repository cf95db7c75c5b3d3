"""Three held-out prompts with what the model writes before and after training, for people to read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ebft.models.causal_lm import evaluating
from ebft.printed import safe_console
from ebft.structured.rollouts.backend import Sampling
from ebft.structured.rollouts.hf import Generator

COUNT = 3
WINDOW_PROMPT = 32  # tokens of a window of a longer text that serve as its prompt
FILE_WIDTH = 140  # characters of a line of the text file
NARROWEST = 110  # characters of a line that has room for three columns of code


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and the held-out text that follows it there."""

    ids: list[int]
    reference: list[int]


@dataclass(frozen=True)
class Sample:
    """A prompt with three continuations, as text."""

    prompt: str
    before: str
    after: str
    reference: str


def choose_prompts(rows: list[dict[str, Any]], longest: int) -> list[Prompt]:
    """COUNT of the held-out rows, at equal distances; references of at most `longest` tokens."""
    prompts = []
    for index in range(COUNT):
        row = rows[index * len(rows) // COUNT]
        ids, length = row["input_ids"], row["prompt_length"] or WINDOW_PROMPT
        prompts.append(Prompt(ids[:length], ids[length : length + longest]))
    return prompts


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompts: list[Prompt], longest: int) -> list[str]:
    """What `model` writes after each prompt: the most likely token each time, up to `longest` of them.

    The text ends with the end-of-text token where the model ended it by itself.
    """
    greedy = Generator(Sampling(temperature=0.0, end_ids=frozenset([tokenizer.eos_token_id])), tokenizer.pad_token_id)
    with evaluating(model):
        written = greedy(model, [prompt.ids for prompt in prompts], [longest] * len(prompts))
    return [tokenizer.decode(completion.ids) for completion in written]


def make_samples(tokenizer: Any, prompts: list[Prompt], before: list[str], after: list[str]) -> list[Sample]:
    """The prompts with their continuations."""
    return [
        Sample(tokenizer.decode(prompt.ids), old, new, tokenizer.decode(prompt.reference))
        for prompt, old, new in zip(prompts, before, after, strict=True)
    ]


def side_by_side(sample: Sample, width: int) -> RenderableType:
    """The prompt, and below it the continuations in columns; below each other where `width` has no room for columns."""
    texts = {"before": sample.before, "after": sample.after, "reference": sample.reference}
    shown = {title: Text(text.strip("\n"), overflow="fold") for title, text in texts.items()}
    if width < NARROWEST:
        parts: RenderableType = Group(*(Panel(text, title=title, title_align="left") for title, text in shown.items()))
    else:
        parts = Table(width=width)
        for title in shown:
            parts.add_column(title, ratio=1)
        parts.add_row(*shown.values())
    return Group(Text(sample.prompt, style="bold"), parts)


def save_samples(samples: list[Sample], path: Path) -> None:
    """Write the samples side by side as a text file."""
    with path.open("w", encoding="utf-8") as file:
        page = safe_console(file=file, width=FILE_WIDTH)
        for sample in samples:
            page.print(side_by_side(sample, FILE_WIDTH), "")
