"""OverTRL: TRL's GRPOTrainer with hooks in its steps, and public names for what is read of its inside.

All private names of TRL that structured mode uses are in this file.

B  completions of a batch, of all processes   F  reward functions
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from ebft import errors, machine, printed, trainer
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.sharding import load_whole
from ebft.monitor.metrics import HeldOutRows
from ebft.prefix.sampling import on_device
from ebft.transformers_internals import send_as_in_checkpoint

PROMPTS, IDS, SAMPLED, COMPLETIONS, LOGPROBS = range(5)  # indices in the result of TRL's `_generate`
ROW = "row"  # key of each row's index in the generation batch
_OVER_TOKENS = ("kl", "entropy", "clip_ratio/", "cispo_clip_ratio", "vespo/")  # beginnings of names
_REFERENCE = "synced_reference.safetensors"  # in checkpoints, the weights of trl.sync_ref_model


class OverTRL(trainer.KeepsLogs, GRPOTrainer):
    """GRPOTrainer with hooks in its steps, which counts held-out rows once, and continues within a generation batch.

    `inputs_of_loss` are the inputs of the micro-batch whose loss is being computed, None at other times.
    `keeps_groups`: see `by_group`.
    """

    inputs_of_loss: dict[str, Any] | None = None
    keeps_groups: bool = False
    use_vllm: bool
    vllm_generation: Any
    scorer: Any  # of RolloutGRPOTrainer, as the next one
    generation: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.held_out_rows: HeldOutRows = HeldOutRows(self, lambda dataset: list(self._get_eval_sampler(dataset)))
        self.held_out_completions: HeldOutCompletions = HeldOutCompletions("eval")
        super().__init__(*args, **kwargs)
        if self.use_vllm:  # the server, or the engine in this process, has all of a multimodal model
            send_as_in_checkpoint(self.vllm_generation, unwrap_adapter(self.model))

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        load_whole()  # the reference model, which TRL loads and then shards

    # TRL's steps, which call the hooks of RolloutGRPOTrainer

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.keeps_groups or self._buffered_inputs is before or len(self._buffered_inputs) == 1:
            return inputs
        self._buffered_inputs = by_group(self._buffered_inputs, self.num_generations)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.take_rows(inputs)
        found = self.add_to_inputs(inputs, super()._generate_and_score_completions(inputs))
        return self.after_inputs(inputs, found) | {ROW: torch.arange(len(inputs))}

    def _generate(self, prompts: list) -> tuple:
        fields = list(super()._generate(prompts))
        if not self.model.training:
            ids, sampled = fields[IDS], fields[SAMPLED]
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            lengths = [len(row) for row in ids] if sampled is None else [sum(mask) for mask in sampled]
            table = torch.tensor([lengths, [row[-1] not in ends for row in ids]], device=self.accelerator.device).T
            self.held_out_completions.add_lengths(self.accelerator.gather(table.contiguous()))
        return tuple(self.after_generation(fields))

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
        sampled = self.generation.sample_turn(prompt_ids)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs) if sampled is None else sampled

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any) -> Tensor:
        self.before_rewards()
        rewards = super()._calculate_rewards(inputs, *args)
        if not self.model.training:
            self.held_out_completions.add_rewards(rewards, self.held_out_rows.copies)
        rewards = self.after_rewards(inputs, rewards)
        self._log_reward_metrics()
        return rewards

    def _log_reward_metrics(self) -> None:
        """Log what reward functions gave to `log_metric`, as TRL does later, which waits twice for every metric."""
        names = sorted(set(gather_object(list(self._pending_metrics))))
        pending = [self._pending_metrics.get(name, []) for name in names]
        sums = torch.tensor([[sum(values), len(values)] for values in pending], dtype=torch.float32)
        if names and self.accelerator.num_processes > 1:
            (sums,) = machine.copy_to(self.accelerator.device, sums)
            sums = self.accelerator.gather(sums[None]).sum(0)
        for name, (total, count) in zip(names, sums.tolist()):
            self.log_mean("train" if self.model.training else "eval", name, total / count)
        self._pending_metrics.clear()

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self.model.training:
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            tokens = self.accelerator.reduce(mask.sum(), "sum").item()
            self.held_out_completions.tokens = tokens / self.held_out_rows.copies
        self.inputs_of_loss = inputs
        try:
            return self.add_to_loss(model, inputs, super()._compute_loss(model, inputs))
        finally:
            self.inputs_of_loss = None

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scored: list[tuple[Tensor, Tensor] | None] = []
        if not compute_aux_loss and all(value is None for value in multimodal.values()):
            with self.accelerator.autocast():
                for ids, mask in zip(*(x.split(batch_size or len(x)) for x in (input_ids, attention_mask))):
                    split = (part for x in (ids, mask) for part in x.tensor_split([-logits_to_keep], dim=1))
                    prompts, completions, prompt_mask, completion_mask = split
                    rows = (prompts, prompt_mask), (completions, completion_mask)
                    scored.append(self.scorer.score(model, *rows, compute_entropy))
        if not scored or any(part is None for part in scored):  # long rows of some models
            options = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss, **multimodal}
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **options
            )
        logps, entropies = zip(*scored)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    # What is read and set of TRL's inside

    @torch.no_grad()
    def first_logps(self, inputs: dict[str, Any], count: int) -> Tensor:
        """Return the log-probabilities (count, C) of the first completions under the model's current weights."""
        ids, mask = (
            torch.cat([inputs[f"prompt_{part}"][:count], inputs[f"completion_{part}"][:count]], dim=1)
            for part in ("ids", "mask")
        )
        length = inputs["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(self.model, ids, mask, length)[0]

    @property
    def trained_micro_batches(self) -> int:
        return self._step

    @property
    def generation_batch(self) -> list[dict[str, Any]] | None:
        """The inputs of the micro-batches of the current generation step; None before the first."""
        return self._buffered_inputs

    @property
    def has_entropy_bonus(self) -> bool:
        return self._entropy_bonus_enabled

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer inside `processing_class`."""
        return self._tokenizer

    def items_of(self, batches: list[Any], device: torch.device) -> Any:
        """Return the number of items that the loss of the batches is normalised by."""
        return self._get_num_items_in_batch(batches, device)

    def importance_ratio(self, difference: Tensor) -> Tensor:
        """Return the ratios, (B, C) or (B, 1), that correct for sampling from another policy, as TRL computes them.

        `difference` (B, C): log-probabilities of the trainer minus the sampler's, 0 at masked tokens.
        """
        mode = self.vllm_importance_sampling_mode
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
        if mode.endswith("truncate"):
            return ratio.clamp(low, high) if low is not None or high is not None else ratio
        outside = (ratio < (low if low is not None else 0.0)) | (ratio > (high if high is not None else float("inf")))
        return ratio.masked_fill(outside, 0.0)

    def log_mean(self, mode: str, name: str, value: float) -> None:
        """Add a value to a metric of `train` or `eval`, whose mean is logged next."""
        self._metrics[mode][name].append(value)

    def log_advantages(self, advantages: Tensor) -> None:
        """Log `advantages` of the completions of all processes in place of TRL's."""
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages.tolist())

    def make_logs_printable(self) -> None:
        """Replace control characters in the texts that TRL prints."""
        if self.log_completions:
            for texts in (self._logs["prompt"], self._logs["completion"], *self._logs["extra"].values()):
                for index in range(len(texts)):
                    texts[index] = printed.all_printable(texts[index])

    def drop_reward_logs(self, prefix: str) -> None:
        """Discard metrics logged by reward functions whose names start with `prefix`."""
        for name in [name for name in self._pending_metrics if name.startswith(prefix)]:
            del self._pending_metrics[name]

    def sync_before_rollouts(self, sampler: Any) -> None:
        """Make TRL synchronise `sampler` before rollouts and apply importance sampling with its log-probabilities."""
        self.use_vllm, self.vllm_generation, self._last_loaded_step = True, sampler, -1

    def sync_if_outdated(self) -> None:
        """Synchronise the sampler, if there is one, unless that was done in this step."""
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def sync_anew(self) -> None:
        """Mark the weights of the sampler as outdated."""
        self._last_loaded_step = -1

    # Held-out rows, each counted once

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return self.held_out_rows.loader(eval_dataset, super().get_eval_dataloader)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        self.held_out_rows.begin_batch()
        logged = self._metrics["eval"]
        before = {name: len(values) for name, values in logged.items()}
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        added = {name: values[before.get(name, 0) :] for name, values in logged.items()}
        loss = self.accelerator.reduce(found[0], "mean").item()
        completions = len(inputs) * self.args.world_size / self.held_out_rows.copies
        self.held_out_completions.add_logged(added | {"loss": [loss]}, completions)
        return found

    def log_held_out(self, logs: dict[str, float]) -> None:
        """Replace the metrics of an evaluation that has ended by means over its completions."""
        means = self.held_out_completions.drain(self.reward_func_names, self.reward_weights, self.num_generations_eval)
        if means:
            logs[f"{self.held_out_completions.prefix}_loss"] = means.pop("loss")
            self._metrics["eval"].update({name: [value] for name, value in means.items()})

    # Resuming, also within a generation batch

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochSampler(super()._get_train_sampler(dataset))

    def running_state(self) -> dict[str, Any]:
        """Return also the position in the generation batch, and the batch if it is still needed."""
        is_used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return super().running_state() | {
            "batches": self._batch_sizes(),
            "micro_batches": self._step,
            "generation_batch": None if is_used_up else self._buffered_inputs,
        }

    def restore_running_state(self, state: dict[str, Any]) -> None:
        super().restore_running_state(state)
        if state.get("batches") == self._batch_sizes():
            self._step, self._buffered_inputs = state["micro_batches"], state["generation_batch"]
        else:  # of an earlier release, of another number of processes, or with other batches
            self._step = self.state.global_step * self.args.gradient_accumulation_steps

    def _batch_sizes(self) -> list[int]:
        """Return what the generation batch of a process, and the number of micro-batches so far, depend on."""
        args = self.args
        sizes = (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.steps_per_generation)
        return [*sizes, self.num_iterations, self.num_generations, args.world_size]

    def save_shared(self, folder: Path) -> None:
        super().save_shared(folder)
        if self.args.sync_ref_model and not self._has_sharded_reference:
            save_model(self.accelerator.unwrap_model(self.ref_model), str(folder / _REFERENCE))

    def load_shared(self, folder: Path) -> None:
        super().load_shared(folder)
        if not self.args.sync_ref_model:
            return
        if self._has_sharded_reference:
            raise errors.ConfigError(
                f"Training cannot be resumed from {folder}: trl.sync_ref_model saves no sharded reference model."
            )
        load_model(self.accelerator.unwrap_model(self.ref_model), str(folder / _REFERENCE))

    @property
    def _has_sharded_reference(self) -> bool:
        return self.is_deepspeed_enabled or self.is_fsdp_enabled


def by_group(batches: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return the rows of shuffled micro-batches such that the rows of a group are adjacent, with the groups shuffled.

    The groups are ordered by their first rows in `batches`, whose number stays the same.
    """
    group = (torch.cat([batch[ROW] for batch in batches]) // size).tolist()
    order = sorted(range(len(group)), key=lambda index: group.index(group[index]))
    per_batch = len(order) // len(batches)
    chunks = [order[start : start + per_batch] for start in range(0, len(order), per_batch)]
    return [{key: _rows_of([batch[key] for batch in batches], chunk) for key in batches[0]} for chunk in chunks]


def _rows_of(parts: list[Any], index: list[int]) -> Any:
    """Return rows of the concatenation of `parts`; scalars and None, which are equal in all parts, as they are."""
    if isinstance(parts[0], list):
        rows = [row for part in parts for row in part]
        return [rows[i] for i in index]
    if not isinstance(parts[0], Tensor) or not parts[0].dim():
        return parts[0]
    return torch.cat(parts).index_select(0, on_device(index, parts[0].device))


def positions_from_mask(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook: set position ids that do not count padding, as in sampling. TRL counts left padding.

    This changes the results of models with learned positions, but not of models with relative positions.
    """
    mask = kwargs.get("attention_mask")
    takes_positions = "position_ids" in inspect.signature(module.forward).parameters
    if takes_positions and kwargs.get("position_ids") is None and isinstance(mask, Tensor) and mask.dim() == 2:
        tokens = args[0] if args else kwargs["input_ids"]
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
    return args, kwargs


class EpochSampler(RepeatSampler):
    """The order of a `RepeatSampler` in epoch e, its e-th iteration, and all rows: it leaves the last ones out if they
    fill no batch, which the first rows of the epoch fill here. RepeatSampler draws each order from a generator that
    continues, so that a resumed run would start again with the order of epoch 0."""

    def __init__(self, plain: RepeatSampler) -> None:
        vars(self).update(vars(plain))
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rows = list(range(self.num_samples))
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch + 1):
                rows = torch.randperm(self.num_samples, generator=self.generator).tolist()
        rows += islice(cycle([*rows]), -len(rows) % self.batch_size)
        for start in range(0, len(rows), self.batch_size):
            for row in rows[start : start + self.batch_size] * self.repeat_count:
                yield from [row] * self.mini_repeat_count
        self.epoch += 1

    def __len__(self) -> int:
        batches = math.ceil(self.num_samples / self.batch_size)
        return batches * self.batch_size * self.mini_repeat_count * self.repeat_count


class HeldOutCompletions:
    """What is known of the completions of one evaluation, whose metrics are logged with `prefix`.

    `tokens`: number of tokens in the loss of a batch. All counts are divided by the processes that evaluate the same
    rows at the same time.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tokens = 0.0
        self._by_batch: dict[str, list[tuple[float, float]]] = defaultdict(list)  # (value, weight) of each batch
        self._by_completion: dict[str, list[Tensor]] = defaultdict(list)  # (B, ...) of each batch

    def add_lengths(self, table: Tensor) -> None:
        """Add the number of sampled tokens of each completion, and whether it was cut at its limit: (B, 2)."""
        self._by_completion["lengths"].append(table.cpu().double())

    def add_rewards(self, rewards_BF: Tensor, copies: int) -> None:
        """Add the rewards of a batch that `copies` processes evaluate."""
        self._by_completion["rewards"].append(rewards_BF.cpu().double())
        self._by_completion["weights"].append(torch.full((len(rewards_BF),), 1.0 / copies, dtype=torch.float64))

    def add_logged(self, logged: dict[str, list[float]], completions: float) -> None:
        """Add what was logged of a batch, by name."""
        for name, values in logged.items():
            weight = self.tokens if name.startswith(_OVER_TOKENS) else completions
            self._by_batch[name] += [(value, weight) for value in values if name == "loss" or not math.isnan(value)]

    def drain(self, names: Sequence[str], reward_weights: Tensor, group_size: int) -> dict[str, float]:
        """Return the means of all metrics, among them `loss`, and forget the completions; empty if there are none.

        `names`: of the reward functions, (F,).
        """
        if not self._by_completion:
            return {}
        means = {name: _joined(name, pairs) for name, pairs in self._by_batch.items() if pairs}
        means |= self._of_all(names, reward_weights, group_size)
        self._by_batch.clear()
        self._by_completion.clear()
        return means

    def _of_all(self, names: Sequence[str], reward_weights: Tensor, group_size: int) -> dict[str, float]:
        """Return the metrics that are computed from the rewards and lengths of all completions, by TRL's names."""
        table = {name: torch.cat(parts) for name, parts in self._by_completion.items()}
        rewards_BF, weights = table["rewards"], table["weights"]
        found = {}
        for name in set(names):  # TRL logs the mean over functions with the same name
            same = [i for i, other in enumerate(names) if other == name]
            means, stds = zip(*(_mean_and_std(rewards_BF[:, i], weights) for i in same))
            found[f"rewards/{name}/mean"], found[f"rewards/{name}/std"] = (sum(x) / len(same) for x in (means, stds))
        total = (rewards_BF * reward_weights.cpu()).nansum(1).masked_fill(rewards_BF.isnan().all(1), math.nan)
        found["reward"], found["reward_std"] = _mean_and_std(total, weights)
        groups = total.view(-1, group_size)
        spread = groups.nan_to_num(-math.inf).amax(1) - groups.nan_to_num(math.inf).amin(1)
        found["frac_reward_zero_std"] = _mean_and_std((spread.abs() < 1e-8).double(), weights.view_as(groups)[:, 0])[0]
        lengths, is_truncated = table["lengths"].unbind(1)
        ended = is_truncated == 0
        for name, kept in (("", torch.ones_like(ended)), ("_terminated", ended)):
            some = lengths[kept] if kept.any() else torch.zeros(1)
            weights_of_some = weights[kept] if kept.any() else torch.ones(1)
            found[f"completions/mean{name}_length"] = _mean_and_std(some, weights_of_some)[0]
            found[f"completions/min{name}_length"] = some.min().item()
            found[f"completions/max{name}_length"] = some.max().item()
        found["completions/clipped_ratio"] = _mean_and_std(is_truncated, weights)[0]
        return found


def _joined(name: str, pairs: list[tuple[float, float]]) -> float:
    """Return the minimum, the maximum or the weighted mean of the values of all batches, by the name of the metric."""
    values = [value for value, _ in pairs]
    if name.endswith(("min", "max")):
        return min(values) if name.endswith("min") else max(values)
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else values[0]


def _mean_and_std(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (with N - 1) of values (B,) that are not NaN."""
    values, weights = values[~values.isnan()], weights[~values.isnan()]
    total = weights.sum()
    mean = (values * weights).sum() / total
    variance = (weights * (values - mean).square()).sum() / (total - 1)
    return mean.item(), variance.sqrt().item()
