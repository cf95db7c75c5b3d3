"""ORPO and SimPO: trainers of `trl.experimental`, whose interface may change in any release of TRL."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ebft.data.transforms.rows import IGNORE
from ebft.preferences.trainers import KeepsMetrics, score_tokens
from ebft.prefix.forward import run_wrapped, take_programs


class PreparedBatches(KeepsMetrics):
    """Mixin for CPOTrainer and ORPOTrainer with rows `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    scores_prompts: ClassVar[bool]  # whether the cross-entropy of chosen texts includes their prompts
    loss_name = "eval_loss"
    loss_items = "nll_loss"
    of_step = ("nll_loss",)
    use_dpo_data_collator: bool

    def __init__(
        self,
        model: nn.Module,
        *,
        args: Any,
        train_dataset: Dataset,
        processing_class: Any,
        eval_dataset: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        args.remove_unused_columns = False  # transformers knows the columns of the model's forward only
        super().__init__(
            model,
            args=args,
            data_collator=PairCollator(processing_class.pad_token_id),
            # TRL tokenises with `map`, which would write into the folder of prepared rows. It gets one row instead.
            train_dataset=Dataset.from_list([train_dataset[0]]),
            eval_dataset=None if eval_dataset is None else Dataset.from_list([eval_dataset[0]]),
            processing_class=processing_class,
            **kwargs,
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.use_dpo_data_collator = True  # batches have the columns of TRL's own collator
        take_programs(self.model)

    @staticmethod
    def tokenize_row(feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        """Return a row as it is: rows have been tokenised."""
        return feature

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return mean log-probabilities (B,) and the mean logit of completions, by side, and the cross-entropy.

        TRL keeps all logits, and returns them in the place of the mean logit, since it logs their mean.
        """
        joined = self.concatenated_inputs(
            batch, padding_value=self.processing_class.pad_token_id, device=self.accelerator.device
        )
        ids, mask, labels = (joined[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
        texts = labels[: len(labels) // 2]
        if self.scores_prompts:
            texts = ids[: len(texts)].masked_fill(mask[: len(texts)] == 0, IGNORE)
        scored = torch.cat([texts, labels[len(texts) :]])
        program = partial(score_tokens, labels=scored, statistics=("mean_logits",), input_ids=ids, attention_mask=mask)
        output = run_wrapped(model, program)
        is_completion = labels[:, 1:].ne(IGNORE)
        means = (output.log_probs * is_completion).sum(-1) / is_completion.sum(-1)
        # Means over the tokens of all processes, whose results are averaged. The cross-entropy is one over the tokens
        # of the step or the evaluation, whose batches are averaged too.
        counts = torch.stack([texts[:, 1:].ne(IGNORE).sum(), *(side.sum() for side in is_completion.chunk(2))])
        of_text, *of_sides = self.accelerator.reduce(counts.float(), reduction="mean")
        divisor = self.divisor(batch)
        of_text = of_text if divisor is None else divisor
        cross_entropy = -output.log_probs.chunk(2)[0].sum() / of_text
        logits = (x.sum() / count for x, count in zip((output.mean_logits * is_completion).chunk(2), of_sides))
        return (*means.chunk(2), *logits, cross_entropy)

    def logged(self, mode: str) -> defaultdict[str, list[float]]:
        return self._stored_metrics[mode]

    def count_rows(self, inputs: dict[str, Tensor]) -> int:
        return len(inputs["chosen_input_ids"])

    def counts_behind(self, inputs: dict[str, Tensor]) -> dict[str, int]:
        chosen, rejected = (int(inputs[f"{side}_labels"][:, 1:].ne(IGNORE).sum()) for side in ("chosen", "rejected"))
        text = int(inputs["chosen_attention_mask"][:, 1:].sum()) if self.scores_prompts else chosen
        return {"logits/chosen": chosen, "logits/rejected": rejected, "nll_loss": text}


with warnings.catch_warnings(action="ignore", category=UserWarning):  # of TRL, on import; the documentation says it
    from trl.experimental import cpo, orpo


class ORPOTrainer(PreparedBatches, orpo.ORPOTrainer):
    """ORPO."""

    scores_prompts = True


class CPOTrainer(PreparedBatches, cpo.CPOTrainer):
    """SimPO, a loss of CPO."""

    scores_prompts = False


@dataclass
class PairCollator:
    """Pads rows of `prompt_ids`, `chosen_ids` and `rejected_ids` on the right.

    The batch contains `input_ids`, `attention_mask` and `labels` (B, S) of both sides, with the prefix `chosen_` or
    `rejected_`; labels are -100 for prompts and padding.
    """

    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {}
        for side in ("chosen", "rejected"):
            sequences = [row["prompt_ids"] + row[f"{side}_ids"] for row in rows]
            labels = [[IGNORE] * len(row["prompt_ids"]) + row[f"{side}_ids"] for row in rows]
            batch[f"{side}_input_ids"] = _padded(sequences, self.pad_token_id)
            batch[f"{side}_attention_mask"] = _padded([[1] * len(ids) for ids in sequences], 0)
            batch[f"{side}_labels"] = _padded(labels, IGNORE)
        return batch


def _padded(rows: list[list[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
