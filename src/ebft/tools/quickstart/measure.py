"""Before and after, in one fixed feature space: the space of the frozen base model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ebft.anchors import BlockOptions
from ebft.data.batches import DocumentCollator
from ebft.data.lengths import block_options
from ebft.data.load import load_token_rows
from ebft.features import FeatureNetwork
from ebft.models.causal_lm import evaluating
from ebft.printed import safe_console
from ebft.strided.held_out import held_out_metrics
from ebft.structured.rollouts.local import Generator
from ebft.structured.rollouts.turns import Sampling

DOCUMENTS_PER_GROUP = 8


@dataclass
class HeldOutText:
    """Documents of held-out files, in groups, with the settings that every measurement shares."""

    rows: list[dict[str, Any]]
    groups: list[dict[str, Tensor]]  # the rows, collated
    block_options: BlockOptions
    seed: int


def held_out_documents(config: Any, tokenizer: Any, groups: int) -> HeldOutText:
    """`groups` x DOCUMENTS_PER_GROUP documents of the config's `test_datasets`, spread evenly over its files.

    Rows without a prompt are windows of a longer text, and only full windows of `sequence_len` tokens are taken.
    """
    rows = load_token_rows(config, tokenizer).evaluation
    usable = [row for row in rows if row["prompt_length"] or len(row["input_ids"]) == config.sequence_len]
    wanted = min(groups, len(usable) // DOCUMENTS_PER_GROUP) * DOCUMENTS_PER_GROUP
    if wanted == 0:
        raise ValueError(
            f"the held-out files have {len(usable)} documents (windows of sequence_len {config.sequence_len} tokens, "
            f"where they have no prompt), and a measurement needs {DOCUMENTS_PER_GROUP}. Lower sequence_len."
        )
    chosen = [usable[i * len(usable) // wanted] for i in range(wanted)]
    collate = DocumentCollator(tokenizer.pad_token_id)
    # Every groups-th document goes into one group, so that each group mixes many files.
    parts = [collate(chosen[i :: wanted // DOCUMENTS_PER_GROUP]) for i in range(wanted // DOCUMENTS_PER_GROUP)]
    blocks = replace(block_options(config, config.ebft, tokenizer), merge_rollouts=None)
    return HeldOutText(chosen, parts, blocks, config.seed)


def measure(model: Any, network: FeatureNetwork, held_out: HeldOutText) -> list[dict[str, float]]:
    """The held-out metrics of `model` in each group of documents; the same noise samples each time it is called."""
    return [
        held_out_metrics(model, network, [group], block_options=held_out.block_options, seed=held_out.seed)
        for group in track(held_out.groups, description="sampling and comparing")
    ]


def means(groups: list[dict[str, float]]) -> dict[str, float]:
    """Each metric over all groups; the perplexity is the exponential of the mean cross-entropy."""
    found = {name: sum(group[name] for group in groups) / len(groups) for name in groups[0]}
    return {**found, "perplexity": math.exp(found["ce_loss"])}


def mean_changes(before: list[dict[str, float]], after: list[dict[str, float]]) -> Iterator[tuple[str, float, float]]:
    """Name, change of the mean and its standard error (NaN for one group) of each metric, paired by group."""
    for name in before[0]:
        differences = [b - a for a, b in zip(_of_groups(before, name), _of_groups(after, name))]
        n, mean = len(differences), sum(differences) / len(differences)
        variance = sum((d - mean) ** 2 for d in differences) / (n - 1) if n > 1 else math.nan
        yield name, mean, math.sqrt(variance / n)


def _of_groups(groups: list[dict[str, float]], name: str) -> list[float]:
    """A metric of each group; of the perplexity of the mean cross-entropy, its first-order expansion (delta method)."""
    if name != "perplexity":
        return [group[name] for group in groups]
    losses = [group["ce_loss"] for group in groups]
    mean = sum(losses) / len(losses)
    return [math.exp(mean) * (1 + loss - mean) for loss in losses]


COUNT = 3
WINDOW_PROMPT = 32  # tokens of a window of a longer text that serve as its prompt
FILE_WIDTH = 140  # characters of a line of the text file
NARROWEST = 110  # characters of a line that has room for three columns of code


@dataclass(frozen=True)
class HeldOutPrompt:
    """Token ids of a prompt, and the held-out text that follows it there."""

    ids: list[int]
    reference: list[int]


@dataclass(frozen=True)
class Continuations:
    """A prompt with three continuations, as text."""

    prompt: str
    before: str
    after: str
    reference: str


def choose_prompts(rows: list[dict[str, Any]], longest: int) -> list[HeldOutPrompt]:
    """COUNT held-out rows, at equal distances; references of at most `longest` tokens."""
    prompts = []
    for index in range(COUNT):
        row = rows[index * len(rows) // COUNT]
        ids, length = row["input_ids"], row["prompt_length"] or WINDOW_PROMPT
        prompts.append(HeldOutPrompt(ids[:length], ids[length : length + longest]))
    return prompts


@torch.no_grad()
def greedy_completions(model: Any, tokenizer: Any, prompts: list[HeldOutPrompt], longest: int) -> list[str]:
    """What `model` writes greedily after each prompt, up to `longest` tokens, with the end-of-text token if any."""
    greedy = Generator(Sampling(temperature=0.0, end_ids=frozenset([tokenizer.eos_token_id])), tokenizer.pad_token_id)
    with evaluating(model):
        written = greedy(model, [prompt.ids for prompt in prompts], [longest] * len(prompts))
    return [tokenizer.decode(completion.ids) for completion in written]


def make_samples(
    tokenizer: Any, prompts: list[HeldOutPrompt], before: list[str], after: list[str]
) -> list[Continuations]:
    """The prompts with their continuations."""
    return [
        Continuations(tokenizer.decode(prompt.ids), old, new, tokenizer.decode(prompt.reference))
        for prompt, old, new in zip(prompts, before, after, strict=True)
    ]


def side_by_side(sample: Continuations, width: int) -> RenderableType:
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


def save_samples(samples: list[Continuations], path: Path) -> None:
    """Write the samples side by side as a text file."""
    with path.open("w", encoding="utf-8") as file:
        page = safe_console(file=file, width=FILE_WIDTH)
        for sample in samples:
            page.print(side_by_side(sample, FILE_WIDTH), "")
