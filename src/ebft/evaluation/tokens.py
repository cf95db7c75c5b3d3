"""Evaluation on rows of tokens: blocks along each document, and full completions for rows with a prompt."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from ebft.data.collator import DocumentCollator
from ebft.data.conversation import Conversation, Renderer, Turn
from ebft.data.lengths import fits_one_block
from ebft.data.transforms.rows import IGNORE
from ebft.errors import ModelError
from ebft.evaluation.completions import Completions
from ebft.evaluation.cross_entropy import token_nll
from ebft.evaluation.downstream import add_downstream
from ebft.evaluation.models import Subject
from ebft.evaluation.task import Task
from ebft.models.causal_lm import unwrap_adapter
from ebft.prefix.policy import check_supported
from ebft.scores import Scores
from ebft.strided.held_out import HeldOutMeasure

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

BLOCK_OPTIONS = ("stride", "context_length", "generate_max_len", "min_completion_prefix")


def measure_tokens(task: Task, subject: Subject) -> Scores:
    """Return the scores of a model on rows of `input_ids`, `labels`, `prompt_length` and `turn_spans`.

    Rows that are too short for a block, which SFT keeps, are used for the cross-entropy only.
    """
    ebft, settings = task.config.ebft, task.settings
    measure = (
        HeldOutMeasure(
            unwrap_adapter(subject.policy),
            subject.network,
            {name: getattr(ebft, name) for name in BLOCK_OPTIONS} | {"n_samples_per_prompt": settings.samples},
            temperature=settings.temperature,
            seed=settings.seed,
            tokens_per_pass=ebft.rollout_tokens_per_pass,
            alignment_coef=ebft.alignment_coef,
            diversity_coef=ebft.diversity_coef,
            pass_at=settings.pass_at,
            curves=True,
            counts_all_labels=not task.config.method.samples_blocks,
        )
        if _takes_blocks(task.config, subject)
        else None
    )
    collate = DocumentCollator(task.tokenizer.pad_token_id)
    scores = Scores() if measure is None else measure.scores
    for rows, documents in task.batches():
        short = [measure is None or not fits_one_block(row, ebft) for row in rows]
        if not all(short):
            measure.add(
                collate([row for row, is_short in zip(rows, short) if not is_short]),
                [document for document, is_short in zip(documents, short) if not is_short],
            )
        _add_short(scores, subject, [(row, d) for row, d, is_short in zip(rows, documents, short) if is_short])
    if task.metrics:
        _add_completions(scores, task, subject)
    return scores


def _takes_blocks(config: RunConfig, subject: Subject) -> bool:
    """Whether blocks can be sampled from the models; if not, raises ModelError in strided mode and warns for SFT."""
    try:
        for model in (unwrap_adapter(subject.policy), subject.network.causal_lm):
            check_supported(model)
    except ModelError as error:
        if config.method.samples_blocks:
            raise
        warnings.warn(f"Only the cross-entropy is evaluated, without feature metrics: {error}.", stacklevel=2)
        return False
    return True


def _add_short(scores: Scores, subject: Subject, rows: list[tuple[dict[str, Any], int]]) -> None:
    for (row, document), nll in zip(rows, token_nll(subject.policy, [row["input_ids"] for row, _ in rows])):
        counted = torch.tensor(row["labels"])[1:] != IGNORE
        scores.add("ce_loss", [document], [nll[counted].sum()], [counted.sum()])
        scores.add("ce_loss_all", [document], [nll.sum()], [len(nll)])


def _add_completions(scores: Scores, task: Task, subject: Subject) -> None:
    """Add the downstream metrics of full completions of every row's prompt."""
    completions = Completions(subject.policy, Renderer(task.tokenizer, task.config.chat_template_kwargs), task)
    for number, (rows, documents) in enumerate(task.batches()):
        documents = [document for row, document in zip(rows, documents) if row["prompt_length"]]
        conversations = [_conversation(row) for row in rows if row["prompt_length"]]
        if not conversations:
            continue
        sampled = completions.sample(conversations, f"batch {number}")
        greedy = completions.greedy(conversations)
        for conversation, document, rollouts, best in zip(conversations, documents, sampled, greedy):
            add_downstream(
                scores,
                task.metrics,
                document,
                task.tokenizer.decode(conversation.prompt_ids, skip_special_tokens=True),
                [completions.text(rollout.ids) for rollout in rollouts],
                completions.text(best.ids),
                task.held_out.raw(document),
                task.settings.pass_at,
            )


def _conversation(row: dict[str, Any]) -> Conversation:
    """Return the prompt of a row of tokens with its completion as reference, whose text is not used."""
    ids, prompt_length = row["input_ids"], row["prompt_length"]
    return Conversation([Turn(ids[:prompt_length], ids[prompt_length:])], ids[:prompt_length])
