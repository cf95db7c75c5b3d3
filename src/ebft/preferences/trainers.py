"""DPO, IPO and KTO: TRL's trainers with the budget, checks and checkpoints of all methods, and what all methods share.

What TRL logs is kept in checkpoints, and weighted by the rows or tokens of each batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from types import MethodType
from typing import Any, ClassVar

import torch
import trl
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler
from transformers import PreTrainedModel
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.utils import FusedCausalLMOutput

from ebft.data.transforms.rows import IGNORE
from ebft.errors import DataError
from ebft.models.causal_lm import backbone_of, unwrap_adapter
from ebft.models.sharding import keep_output_dtype
from ebft.monitor.metrics import HeldOutRows, sums_over_ranks
from ebft.prefix.forward import head_of, take_programs
from ebft.prefix.logps import choose_tokens, with_gradient
from ebft.prefix.sampling import Softmax
from ebft.trainer import MeansOverRows

_OF_ROWS = ("rewards/", "logps/", "log_odds_")  # metrics that are means over rows, unless `counts_behind` has them
_ROWS = ""  # the number of rows among counts


class KeepsMetrics(MeansOverRows):
    """Trainer whose metrics continue after a resume, and whose means count every row or token once.

    TRL logs the mean of the values of batches, each a mean over the rows or tokens of all processes. `loss_name`: the
    name of the loss in `logged("eval")`. `loss_items`: the name in `counts_behind` of the items over which a term of
    the loss is a mean, or None if it is one over rows. `of_step`: metrics that are normalised by `divisor` already.
    """

    ref_model: nn.Module | None = None
    loss_name = "loss"
    loss_items: str | None = None
    of_step: ClassVar[tuple[str, ...]] = ()
    _next_counts: dict[str, float]
    _per_batch: float | None = None  # items of the loss per micro-batch of the current step
    _per_row: float | None = None  # items of the loss per row of the current evaluation
    _is_evaluating: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.held_out_rows: HeldOutRows = HeldOutRows(self)
        super().__init__(*args, **kwargs)

    def computing_models(self) -> list[nn.Module]:
        """Return the policy, and the reference model if it is not the policy without its adapter."""
        return [self.model] if self.ref_model is None else [self.model, self.ref_model]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_output_dtype(self.accelerator)  # before the reference model is sharded

    @abstractmethod
    def counts_behind(self, inputs: dict[str, Tensor]) -> dict[str, int]:
        """Return the number of items of a batch for metrics that are not means over its rows, always the same names."""

    def divisor(self, inputs: dict[str, Tensor]) -> float | None:
        """Return the number by which the loss divides the sum over the items of a batch of this process.

        With it, the mean over the micro-batches of a step, or over the rows of an evaluation, and over processes, is
        the mean over all of their items. None in a pass that is part of neither.
        """
        if self._is_evaluating:
            return None if self._per_row is None else self._per_row * self.count_rows(inputs)
        return None if self._per_batch is None else self._per_batch * self._share

    def _counts(self, inputs: dict[str, Tensor]) -> dict[str, int]:
        return self.counts_behind(inputs) | {_ROWS: self.count_rows(inputs)}

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        loader = self.held_out_rows.loader(eval_dataset, super().get_eval_dataloader)
        self._per_row = None
        if self.loss_items is not None:
            rows = [loader.dataset[index] for index in range(len(loader.dataset))]
            items = sum(self.counts_behind(loader.collate_fn([row]))[self.loss_items] for row in rows)
            self._per_row = items / len(rows)
        return loader

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | int | None:
        if batch_samples:
            self._next_counts = self._of_all([self._counts(inputs) for inputs in batch_samples])
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        logged = self.logged("train")
        before = {name: len(values) for name, values in logged.items()}
        batches = self.current_gradient_accumulation_steps
        if self.loss_items is not None:
            self._per_batch = self._next_counts[self.loss_items] / (batches * self.accelerator.num_processes)
        # Of every micro-batch of the last step of an epoch, gather_for_metrics keeps as many rows as the last one has.
        self.accelerator.gather_for_metrics = self.accelerator.gather
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._per_batch = None
            del self.accelerator.gather_for_metrics
        counts = self._of_all([self._counts(inputs)])
        rows = counts.pop(_ROWS)
        # The mean over the micro-batches becomes the mean over the items, or the rows, of the step.
        for name, count in counts.items():
            total = self._next_counts[name]
            if name in self.of_step:
                logged[name][-1] *= self.share(inputs)
            if name in self.of_step or not total:
                continue
            if len(logged[name]) == before.get(name, 0):  # TRL leaves out means over nothing
                logged[name].append(0.0)
            logged[name][-1] *= count * batches / total
        for name, values in logged.items():
            if name.startswith(_OF_ROWS) and name not in counts and len(values) > before.get(name, 0):
                values[-1] *= rows * batches / self._next_counts[_ROWS]
        return loss

    def _of_all(self, counts: list[dict[str, int]]) -> dict[str, float]:
        """Return the sums of counts by name, over batches and processes."""
        sums = torch.tensor([[float(x) for x in of_batch.values()] for of_batch in counts], dtype=torch.float64).sum(0)
        return dict(zip(counts[0], sums_over_ranks(sums.tolist(), self.accelerator)))

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        self.held_out_rows.begin_batch()
        logged = self.logged("eval")
        before = {name: len(values) for name, values in logged.items()}
        self._is_evaluating = True
        try:
            found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._is_evaluating = False
        if self.args.world_size > 1:
            logged[self.loss_name].append(self.accelerator.reduce(found[0], reduction="mean").item())
        counts = self._of_all([self._counts(inputs)])
        for name, values in logged.items():  # TRL logs the mean of the values, one for each batch
            if len(values) > before.get(name, 0):
                metric = name.removeprefix("eval_")
                count = counts[_ROWS] if metric in self.of_step else counts.get(metric, counts[_ROWS])
                values += values[-1:] * (int(count) // self.held_out_rows.copies - 1)
        return found


# What TRL logs of the distributions at scored tokens, by the name of its output: functions of the softmax and the
# tokens (rows, 1) with values (rows, 1).
STATISTICS: dict[str, Callable[[Softmax, Tensor], Tensor]] = {
    "entropy": lambda softmax, tokens: softmax.entropy(),
    "mean_logits": lambda softmax, tokens: softmax.mean_score(),
    "is_top1": lambda softmax, tokens: softmax.most_likely().eq(tokens),
    "log_sum_sq_probs": lambda softmax, tokens: softmax.log_sum_of_squares(),
}


def score_in_chunks(model: nn.Module, statistics: tuple[str, ...] = ()) -> None:
    """Replace the forward of the causal LM in `model` if it is called with `fused_lm_head`, as TRL's trainers do.

    Must be called after TRL has replaced it. Can be called repeatedly.
    """
    causal_lm = unwrap_adapter(model)
    if "scores_in_chunks" in causal_lm.__dict__:
        return
    take_programs(causal_lm)
    causal_lm.scores_in_chunks = True
    whole = causal_lm.forward

    @wraps(type(causal_lm).forward)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return score_tokens(self, statistics=statistics, **kwargs) if fused_lm_head else whole(*args, **kwargs)

    causal_lm.forward = MethodType(forward, causal_lm)


def score_tokens(
    causal_lm: PreTrainedModel, labels: Tensor, statistics: tuple[str, ...], **inputs: Any
) -> FusedCausalLMOutput:
    """Return the log-probabilities of `labels` (B, S) and `statistics`, (B, S - 1) each, 0 without a label.

    Must be called inside the forward of the outermost module. `inputs` are the arguments of the model's forward.
    """
    states = backbone_of(causal_lm)(**inputs | {"use_cache": False})[0][:, :-1]
    targets = labels[:, 1:].to(states.device)
    is_scored = targets.ne(IGNORE)
    scored, tokens = states[is_scored], targets[is_scored].unsqueeze(-1)  # (R, D), (R, 1)
    found: dict[str, list[Tensor]] = {name: [] for name in statistics}

    def choose(softmax: Softmax, rows: slice) -> Tensor:
        for name, values in found.items():
            values.append(STATISTICS[name](softmax, tokens[rows]))
        return tokens[rows]

    head = head_of(causal_lm)
    has_gradient = torch.is_grad_enabled() and (states.requires_grad or bool(head.trained))
    slopes = has_gradient and not head.trained
    choices = choose_tokens(scored.detach(), choose, head, 1.0, slopes, None, tokens)
    logps = with_gradient(scored, choices, head, 1.0) if has_gradient else choices.logps

    def by_token(values: Tensor) -> Tensor:
        return values.new_zeros(is_scored.shape).masked_scatter(is_scored, values.squeeze(-1))

    return FusedCausalLMOutput(
        log_probs=by_token(logps),
        label_mask=is_scored,
        **{name: by_token(torch.cat(values)) for name, values in found.items()},
    )


_REFERENCE = "ref"  # TRL's name for its copy of an adapter


class HasReference(KeepsMetrics):
    """Mixin for TRL's trainers with a reference model. `is_new_adapter`: whether the adapter was just created."""

    use_weighting = False  # of the tokens of the loss, which DPO has

    def __init__(self, model: nn.Module, *, is_new_adapter: bool, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        if is_new_adapter:  # equal to no adapter, so that a second one is not needed
            self.model.delete_adapter(_REFERENCE)
        self.replace_forwards()

    def replace_forwards(self) -> None:
        weights = ("log_sum_sq_probs",) if self.use_weighting else ()
        score_in_chunks(self.model, ("entropy", "mean_logits", "is_top1", *weights))
        if self.ref_model is not None:
            score_in_chunks(self.ref_model)

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        self.replace_forwards()
        return super()._precompute_ref_logps(dataset, name, batch_size)


class DPOTrainer(HasReference, trl.DPOTrainer):
    """DPO and IPO, for rows `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    loss_types: list[str]
    loss_weights: list[float]

    @property
    def loss_items(self) -> str | None:
        """Tokens of chosen completions; the loss `sft` is a mean over them."""
        return "logits/chosen" if "sft" in self.loss_types else None

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

    _others: list[list[int]]  # the first completion, and the first one that differs from it, if there is one

    def __init__(
        self, model: nn.Module, *, args: Any, train_dataset: Dataset, processing_class: Any, **kwargs: Any
    ) -> None:
        if len(train_dataset) < 2:
            raise DataError("rl: kto: there is one training row, but the KL term needs completions of other rows.")
        completions = train_dataset["completion_ids"]
        self._others = [first := completions[0], *islice((ids for ids in completions if ids != first), 1)]
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

    A batch of one row gets one of the `spares`: the KL term compares mismatched pairs, so not its own completion.
    """
    ids = rows["completion_ids"]
    if len(ids) == 1:
        return {"KL_completion_ids": [next((spare for spare in spares if spare != ids[0]), ids[0])]}
    return {"KL_completion_ids": [*ids[-1:], *ids[:-1]]}


def without_router_loss(model: nn.Module) -> None:
    """Let a mixture of experts return no load-balancing loss, which TRL would add to the other losses."""
    config = unwrap_adapter(model).config
    for settings in (config, config.get_text_config()):
        if hasattr(settings, "output_router_logits"):
            settings.output_router_logits = False
