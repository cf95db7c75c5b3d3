"""The results of a strided training step, for users of the trainer and for the log of rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ebft.monitor.metrics import MeanMetrics
from ebft.rewards import FeatureMatch
from ebft.strided.layout import Documents, StridedLayout


@dataclass
class StridedOutput:
    """The results of one step, all detached. Entries of masked-out blocks are zero.

    anchors (B, NB) long; block_mask (B, NB) bool; reference_lengths (B, NB) long; rollouts (B, N, NB, G) long, the end
    token repeated after their end; lengths (B, N, NB) long: their tokens, including the one that ends them; logps
    (B, N, NB, G) float32, 0 after the end; alignment, diversity, rewards, advantages (B, N, NB) float32; cfm (B, NB)
    float32; scalars rl_loss, ce_loss, loss.
    """

    anchors: Tensor
    block_mask: Tensor
    reference_lengths: Tensor
    rollouts: Tensor
    lengths: Tensor
    logps: Tensor
    alignment: Tensor
    diversity: Tensor
    rewards: Tensor
    advantages: Tensor
    cfm: Tensor
    rl_loss: Tensor
    ce_loss: Tensor
    loss: Tensor

    @classmethod
    def of(
        cls,
        documents: Documents,
        layout: StridedLayout,
        tokens: Tensor,
        logps: Tensor,
        match: FeatureMatch,
        advantages: Tensor,
        rl_loss: Tensor,
        ce_loss: Tensor,
        loss: Tensor,
    ) -> StridedOutput:
        """Convert the per-block results of a step to (documents, samples, blocks)."""

        def samples_first(values: Tensor) -> Tensor:
            return layout.for_users(values).transpose(1, 2).contiguous()

        return cls(
            anchors=layout.for_users(layout.block_anchors),
            block_mask=layout.block_mask(),
            reference_lengths=layout.for_users(layout.lengths(documents.tokens[layout.reference_index()])),
            rollouts=samples_first(tokens),
            lengths=samples_first(layout.lengths(tokens)),
            logps=samples_first(logps.detach()),
            alignment=samples_first(match.alignment),
            diversity=samples_first(match.diversity),
            rewards=samples_first(match.rewards),
            advantages=samples_first(advantages),
            cfm=layout.for_users(match.cfm),
            rl_loss=rl_loss.detach(),
            ce_loss=ce_loss.detach(),
            loss=loss.detach(),
        )

    def rows(self, documents: Documents, step: int, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yield one entry of the log of rollouts per document with blocks; token ids instead of texts if no tokenizer.

        `step`: the number of completed optimizer steps after the update that uses them, as in the trainer's logs.
        A sample is the document up to token `anchor`, which is up to character `offset` of its text, continued with
        `completion` instead of `reference`.
        """

        def texts(ids: list[list[int]]) -> list[Any]:
            return ids if tokenizer is None else tokenizer.batch_decode(ids)

        samples = self.rollouts.shape[1]
        names = ("alignment", "diversity", "rewards", "advantages")
        per_sample = dict(zip(names, torch.stack([getattr(self, name) for name in names]).cpu()))
        of_blocks = self.rollouts, self.lengths, self.anchors, self.reference_lengths, self.block_mask
        rollouts, sampled, anchors_of_all, of_references, is_block = (x.cpu() for x in of_blocks)
        for number, ids in enumerate(documents.host_tokens.split(documents.lengths.tolist())):
            anchors = anchors_of_all[number][is_block[number]].tolist()
            if not anchors:
                continue
            lengths = sampled[number, :, : len(anchors)].flatten().tolist()
            of_samples = rollouts[number, :, : len(anchors)].flatten(0, 1).tolist()
            completions = texts([tokens[:length] for tokens, length in zip(of_samples, lengths)])
            of_anchors = zip(anchors, of_references[number].tolist())
            references = texts([ids[anchor : anchor + length].tolist() for anchor, length in of_anchors])
            offsets = anchors if tokenizer is None else _characters_before(anchors, ids.tolist(), tokenizer)
            values = {name: value[number].tolist() for name, value in per_sample.items()}
            yield {
                "step": step,
                "document": texts([ids.tolist()])[0],
                "prompt_tokens": documents.turns[number, 0, 0].item(),  # before the first turn with blocks
                "blocks": [
                    {
                        "anchor": anchor,
                        "offset": offsets[block],
                        "reference": references[block],
                        "samples": [
                            {
                                "completion": completions[sample * len(anchors) + block],
                                "tokens": lengths[sample * len(anchors) + block],
                                **{name: value[sample][block] for name, value in values.items()},
                            }
                            for sample in range(samples)
                        ],
                    }
                    for block, anchor in enumerate(anchors)
                ],
            }


_OVERLAP = 4  # tokens; some tokenizers omit a space before the first token of a text


def _characters_before(anchors: list[int], ids: list[int], tokenizer: Any) -> list[int]:
    """Return the number of characters of a document's text before each anchor, from the texts between anchors.

    May be off by one where an anchor is inside a character of several tokens.
    """
    starts = [max(0, previous - _OVERLAP) for previous in (0, *anchors)][:-1]
    until = tokenizer.batch_decode([ids[start:anchor] for start, anchor in zip(starts, anchors)])
    overlaps = tokenizer.batch_decode([ids[start:previous] for start, previous in zip(starts, (0, *anchors))])
    return list(accumulate(len(text) - len(overlap) for text, overlap in zip(until, overlaps)))


class StepMetrics(MeanMetrics):
    """Sums of the terms of steps, which are logged as means."""

    def record(
        self, output: StridedOutput, entropy: Tensor, text_logps: Tensor, documents: Documents, layout: StridedLayout
    ) -> None:
        """Accumulate the sums of the logged means, over samples, blocks and tokens (masked-out blocks are zero)."""
        blocks = layout.num_blocks
        samples, generated = blocks * layout.num_samples, output.lengths.sum()
        add = self.add
        add("ebft/alignment", output.alignment.sum(), samples)
        add("ebft/diversity", output.diversity.sum(), samples)
        add("ebft/mean_reward", output.rewards.sum(), samples)
        add("ebft/cfm_loss", output.cfm.sum(), blocks)
        add("ebft/advantages_mean", output.advantages.sum(), samples)
        add("ebft/advantages_std", output.advantages.square().sum(), samples)
        add("ebft/rl_loss", -(output.advantages.unsqueeze(-1) * output.logps).sum(), generated)
        add("ebft/ce_loss", -text_logps.detach().sum(), int(documents.ce_mask.sum()))
        add("entropy", entropy.sum(), generated)

    def drain(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the logged means, with `ebft/reward` as an alias of the mean reward and the std of the advantages."""
        means = super().drain(accelerator)
        if means:
            mean = means.pop("ebft/advantages_mean")
            means["ebft/advantages_std"] = max(means["ebft/advantages_std"] - mean**2, 0.0) ** 0.5
            means["ebft/reward"] = means["ebft/mean_reward"]
        return means
