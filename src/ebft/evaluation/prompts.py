"""Evaluation on prompts: full completions are compared with their references.

N  samples of a prompt   D  feature dimension
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ebft.data.conversation import Conversation, Renderer, without_end
from ebft.evaluation.completions import Completions
from ebft.evaluation.cross_entropy import token_nll
from ebft.evaluation.downstream import add_downstream
from ebft.evaluation.models import Subject
from ebft.evaluation.task import Task
from ebft.features import check_sampled_ids
from ebft.models.causal_lm import unwrap_adapter
from ebft.rewards import unbiased_cfm_loss
from ebft.scores import CURVE, Scores, curve_lengths, feature_scores
from ebft.structured.embed import continuation_features, pool_sequence
from ebft.structured.references import labelled_reference
from ebft.structured.rollouts.turns import Rollout, reply_messages

EXACT_POSITIONS = 16  # curves have a point for each of these positions, and then one for each power of two


class PromptMeasure:
    """Computes the scores of a model on rows of `prompt` and `ground_truth`."""

    def __init__(self, task: Task, subject: Subject) -> None:
        self.task, self.subject = task, subject
        self.renderer = Renderer(task.tokenizer, task.config.chat_template_kwargs)
        self.completions = Completions(subject.policy, self.renderer, task)
        # Without comparisons in training, replies follow the generation prompt of the chat template, as there.
        self._compares = task.config.method.compares_features(task.config)
        self.scores = Scores()

    def run(self) -> Scores:
        """Return the scores of all rows; rows without a reference (`rl: grpo`) are used for downstream metrics only."""
        for number, (rows, documents) in enumerate(self.task.batches()):
            conversations = [self.renderer.of_row(row) for row in rows]
            asked = [self.renderer.of_row(row, self._compares) for row in rows]
            compared = [has_reference(row) and self._fits(talk) for row, talk in zip(rows, conversations)]
            for document, conversation, has_room in zip(documents, conversations, compared):
                if has_room:
                    self._add_cross_entropy(document, conversation)
            sampled = self.completions.sample(asked, f"batch {number}")
            greedy = self.completions.greedy(asked) if self.task.metrics else [None] * len(rows)
            found = zip(rows, documents, conversations, compared, sampled, greedy)
            for row, document, conversation, has_room, rollouts, best in found:
                if has_room:
                    self._add_features(document, conversation, rollouts)
                    self._add_rollout_nll(document, rollouts)
                if self.task.metrics:
                    self._add_downstream(document, row, rollouts, best, self.task.held_out.raw(document))
        return self.scores

    def _fits(self, conversation: Conversation) -> bool:
        """Whether prompt and reference fit the model: `rl: grpo` keeps rows whose ground_truth is no such reference."""
        config = unwrap_adapter(self.subject.policy).config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        # The token that ends the reference is scored too.
        return limit is None or len(conversation.prompt_ids) + len(conversation.reference_ids) < limit

    def _add_features(self, document: int, conversation: Conversation, rollouts: list[Rollout]) -> None:
        network, ebft = self.subject.network, self.task.config.ebft
        ids = [without_end(rollout.ids, self.completions.end_ids) for rollout in rollouts]
        check_sampled_ids(network, max(max(rollout.ids) for rollout in rollouts))
        prompt, own = continuation_features(network, *conversation.compared(rollouts[0].prompt_ids, ids))
        coefficients = {"alignment_coef": ebft.alignment_coef, "diversity_coef": ebft.diversity_coef}

        def embedded(length: int | None) -> tuple[Tensor, Tensor]:
            """Return the embeddings of samples (1, N, D) and reference (1, D), from their first `length` tokens."""
            phi = torch.stack([pool_sequence(prompt, features[:length], network.embed_method) for features in own])
            return phi[None, :-1], phi[None, -1]

        whole = embedded(None)
        options = {"pass_at": self.task.settings.pass_at, "computed_in": network.computed_in}
        self.scores.add_all(feature_scores(*whole, **coefficients, **options), [document])
        self.scores.keep_samples(*whole, **coefficients)
        # Powers of two only: other lengths would each be covered by a single reference.
        for length in curve_lengths(len(conversation.reference_ids) + 1)[:-1]:
            self.scores.add(f"{CURVE}/cfm_loss/{length}", [document], unbiased_cfm_loss(*embedded(length)))

    def _add_cross_entropy(self, document: int, conversation: Conversation) -> None:
        ids, counts = labelled_reference(conversation, mask_thinking=self.task.config.ebft.mask_thinking_ce)
        (nll,) = token_nll(self.subject.policy, [conversation.prompt_ids + ids])
        of_reference, counted = nll[len(nll) - len(ids) :], torch.tensor(counts)
        self.scores.add("ce_loss", [document], [(of_reference * counted).sum()], [counted.sum()])
        self.scores.add("ce_loss_all", [document], [nll.sum()], [len(nll)])
        self._add_positions("reference_nll", document, of_reference)

    def _add_rollout_nll(self, document: int, rollouts: list[Rollout]) -> None:
        """Add the cross-entropy of the samples under the policy and under the base model, at temperature 1."""
        sequences = [rollout.prompt_ids + rollout.ids for rollout in rollouts]
        with self.subject.network.frozen() as base:
            by_base = token_nll(base, sequences)
        for name, found in (("rollout_nll", token_nll(self.subject.policy, sequences)), ("rollout_nll_base", by_base)):
            for rollout, nll in zip(rollouts, found):
                self._add_positions(name, document, nll[len(nll) - len(rollout.ids) :])

    def _add_positions(self, name: str, document: int, nll: Tensor) -> None:
        for position, value in enumerate(nll.tolist()):
            self.scores.add(f"{CURVE}/{name}/{_bin(position)}", [document], [value])

    def _add_downstream(
        self, document: int, row: dict[str, Any], rollouts: list[Rollout], best: Rollout, raw: dict[str, Any]
    ) -> None:
        add_downstream(
            self.scores,
            self.task.metrics,
            document,
            row["prompt"],
            [self._reply(rollout, row) for rollout in rollouts],
            self._reply(best, row),
            {**raw, **row},
            self.task.settings.pass_at,
        )

    def _reply(self, rollout: Rollout, row: dict[str, Any]) -> str | list[dict[str, Any]]:
        """Return a completion as text, or, for several turns, as messages starting with the first reply."""
        if not row.get("remaining_turns"):
            return self.completions.text(rollout.ids)
        return reply_messages(self.completions.tokenizer, rollout, row["remaining_turns"])


def measure_prompts(task: Task, subject: Subject) -> Scores:
    """Return the scores of a model on rows of `prompt` and `ground_truth`."""
    return PromptMeasure(task, subject).run()


def has_reference(row: dict[str, Any]) -> bool:
    """Whether a row has a reference text, which is optional with `rl: grpo`."""
    return isinstance(row["ground_truth"], str) and bool(row["ground_truth"].strip())


def _bin(position: int) -> int:
    return position if position < EXACT_POSITIONS else 1 << (position.bit_length() - 1)
