"""DPO, IPO and KTO: TRL's trainers with the budget, checks and checkpoints of all methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import trl
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import RandomSampler, Sampler, SequentialSampler
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from ebft.errors import DataError
from ebft.models.causal_lm import unwrap_adapter
from ebft.preferences.trl import KeepsMetrics, Logged, score_in_chunks

_REFERENCE = "ref"  # TRL's name for its copy of an adapter


class HasReference(KeepsMetrics):
    """Mixin for TRL's trainers with a reference model. `is_new_adapter`: whether the adapter was just created."""

    ref_model: nn.Module | None

    def __init__(self, model: nn.Module, *, is_new_adapter: bool, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        if is_new_adapter:  # equal to no adapter, so that a second one is not needed
            self.model.delete_adapter(_REFERENCE)
        self.replace_forwards()

    def replace_forwards(self) -> None:
        """Score in chunks."""
        score_in_chunks(self.model, ("entropy", "mean_logits", "is_top1", *self.more_statistics()))
        if self.ref_model is not None:
            score_in_chunks(self.ref_model)

    def more_statistics(self) -> tuple[str, ...]:
        """What the loss needs of the policy in addition to log-probabilities."""
        return ()

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        self.replace_forwards()
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def logged(self, mode: str) -> Logged:
        return self._metrics[mode]

    def running_state(self) -> dict[str, Any]:
        return super().running_state() | {"tokens": self._total_train_tokens}

    def restore_running_state(self, state: dict[str, Any]) -> None:
        super().restore_running_state(state)
        self._total_train_tokens = state.get("tokens", 0)


class DPOTrainer(HasReference, trl.DPOTrainer):
    """DPO and IPO, for rows `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    use_weighting: bool
    loss_types: list[str]
    loss_weights: list[float]

    @property
    def loss_items(self) -> str | None:
        """Tokens of chosen completions; the loss `sft` is a mean over them."""
        return "logits/chosen" if "sft" in self.loss_types else None

    def more_statistics(self) -> tuple[str, ...]:
        return ("log_sum_sq_probs",) if self.use_weighting else ()

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss, in which `sft` is a mean over the tokens of the step or the evaluation."""
        divisor, weights = self.divisor(inputs), self.loss_weights
        if divisor is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        scale = self.counts_behind(inputs)["logits/chosen"] / divisor
        self.loss_weights = [
            weight * scale if of == "sft" else weight for of, weight in zip(self.loss_types, weights, strict=True)
        ]
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.loss_weights = weights

    def count_rows(self, inputs: dict[str, Tensor]) -> int:
        return len(inputs["input_ids"]) // 2  # chosen, then rejected

    def counts_behind(self, inputs: dict[str, Tensor]) -> dict[str, int]:
        chosen, rejected = (int(side.sum()) for side in inputs["completion_mask"][:, 1:].chunk(2))
        of_sides = {"logits/chosen": chosen, "logits/rejected": rejected}
        return of_sides | {"entropy": chosen + rejected, "mean_token_accuracy": chosen}

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, name: str) -> Dataset:
        # TRL would store precomputed log-probabilities in the folder of prepared rows.
        return Dataset(dataset.with_format("arrow")[:]) if args.precompute_ref_log_probs else dataset


class KTOTrainer(HasReference, trl.KTOTrainer):
    """KTO, for rows `prompt_ids`, `completion_ids` and `label`.

    TRL estimates the KL term of a batch with its prompts and completions in other pairs. It pairs them before training,
    which keeps batches the same in every epoch. Here the collator pairs the rows of each batch, so rows are shuffled
    as with the other methods, unless log-probabilities of the pairs are computed before training. The row of a batch of
    one, such as the last of an epoch or of an evaluation, gets the completion of another training row.
    """

    _others: list[list[int]]  # see `spare_completions`

    def __init__(
        self, model: nn.Module, *, args: Any, train_dataset: Dataset, processing_class: Any, **kwargs: Any
    ) -> None:
        self._others = spare_completions(train_dataset)
        collator = OtherCompletions(processing_class.pad_token_id, max_length=args.max_length, spares=self._others)
        super().__init__(
            model,
            args=args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            data_collator=collator,
            **kwargs,
        )

    def count_rows(self, inputs: dict[str, Tensor]) -> int:
        return len(inputs["label"])

    def counts_behind(self, inputs: dict[str, Tensor]) -> dict[str, int]:
        is_desirable = inputs["label"].bool()
        tokens = inputs["completion_mask"][:, 1:].sum(-1)
        counts = {"entropy": int(tokens.sum())}
        for side, rows in (("chosen", is_desirable), ("rejected", ~is_desirable)):
            counts |= {f"logits/{side}": int(tokens[rows].sum())}
            counts |= {f"{name}/{side}": int(rows.sum()) for name in ("rewards", "logps")}
        return counts

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; the margin is the difference of the means over all rows, not the mean over batches."""
        found = self.logged("train" if self.model.training else "eval")
        chosen, rejected = (found.get(f"rewards/{side}") for side in ("chosen", "rejected"))
        if chosen and rejected:
            found["rewards/margins"] = [sum(chosen) / len(chosen) - sum(rejected) / len(rejected)]
        super().log(logs, start_time)

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, name: str) -> Dataset:
        """Add the completion of another row of the same batch if log-probabilities are computed before training."""
        if not args.precompute_ref_log_probs:
            return dataset
        is_training = name == "train"
        size = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
        # In memory, since `map` would write into the folder of prepared rows.
        return dataset.map(
            with_other_completions,
            fn_kwargs={"spares": self._others},
            batched=True,
            batch_size=size,
            keep_in_memory=True,
        )

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset) if self.args.precompute_ref_log_probs else RandomSampler(dataset)


@dataclass
class OtherCompletions(DataCollatorForUnpairedPreference):
    """TRL's collator of KTO, for rows that may lack the completion of another row of the batch."""

    spares: Sequence[list[int]] = ()

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if "KL_completion_ids" not in examples[0]:
            rows = {"completion_ids": [row["completion_ids"] for row in examples]}
            others = with_other_completions(rows, self.spares)
            examples = [row | {"KL_completion_ids": ids} for row, ids in zip(examples, others["KL_completion_ids"])]
        return super().torch_call(examples)


def with_other_completions(rows: dict[str, list], spares: Sequence[list[int]]) -> dict[str, list]:
    """Return the completions of a batch, each moved to the next row and the last one to the first.

    A batch of one row gets one of the `spares`, see `spare_completions`: with its own completion, the KL term would not
    compare mismatched pairs.
    """
    ids = rows["completion_ids"]
    if len(ids) == 1:
        return {"KL_completion_ids": [next((spare for spare in spares if spare != ids[0]), ids[0])]}
    return {"KL_completion_ids": [*ids[-1:], *ids[:-1]]}


def spare_completions(dataset: Dataset) -> list[list[int]]:
    """Return the first completion, and the first one that differs from it, if there is one.

    Raises DataError for a single row, which has no other completion.
    """
    if len(dataset) < 2:
        raise DataError(
            "rl: kto: there is one training row, but the KL term pairs prompts with completions of other rows. Provide "
            "at least 2 rows."
        )
    completions = dataset["completion_ids"]
    first = completions[0]
    return [first, *islice((ids for ids in completions if ids != first), 1)]


def without_router_loss(model: nn.Module) -> None:
    """Let a mixture of experts return no load-balancing loss, which TRL would add to the other losses."""
    config = unwrap_adapter(model).config
    for settings in (config, config.get_text_config()):
        if hasattr(settings, "output_router_logits"):
            settings.output_router_logits = False
