"""RolloutGRPOTrainer: TRL's GRPOTrainer with rollouts of full conversations from generate() or a vLLM server.

Rewards, advantages and the loss are TRL's. Rollouts are those of ebft.structured.generation.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft.config import rules
from ebft.data.json_files import with_own_calls
from ebft.errors import ConfigError, NonFiniteLossError
from ebft.models.causal_lm import backbone_of, unwrap_adapter
from ebft.models.pretrained import disable_dropout, load
from ebft.models.sharding import check_version, is_sharded, keep_output_dtype
from ebft.monitor.budget import CountsBudget, forward_flops
from ebft.monitor.metrics import Throughput
from ebft.monitor.run_files import ScoredRollouts
from ebft.reward_functions.calls import checked_functions, run_in_chunks
from ebft.reward_functions.processes import run_in_workers
from ebft.structured.config import RolloutGRPOConfig
from ebft.structured.generation import CONVERSATION, GeneratesRollouts, Row
from ebft.structured.interactive import check_interactive, guarded
from ebft.structured.reward import FeatureMatchingReward
from ebft.structured.rollouts.server import Agents
from ebft.structured.validation import (
    check_arguments,
    check_model,
    check_reference_model,
    check_reward_funcs,
    check_reward_templates,
    check_rows,
    check_tokenizer,
)
from ebft.trainer.stopping import StopOnNonFinite


class RolloutGRPOTrainer(CountsBudget, StopOnNonFinite, GeneratesRollouts):
    """TRL's GRPOTrainer with completions that are generated turn by turn, each with a separate token limit.

    Rows contain `prompt` and the columns that the reward functions read; `remaining_turns` are generated in order.
    `rollout_func`, `tools` and `environment_factory` are those of TRL; all turns are sampled by `sample`.
    `rewards` (completions of all processes, functions) are those of the last batch, NaN for no reward.
    `scored_rollouts.hooks` are called with the rollouts of each batch and their total rewards (completions,).
    `server_failure` returns why a server started for this run failed permanently, or None if it has not. `agents` hold
    the conversations, if given; they sample an adapter from a vLLM server.
    """

    args: RolloutGRPOConfig
    rewards: Tensor
    log_completions: bool
    config_class: type[RolloutGRPOConfig] = RolloutGRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: RolloutGRPOConfig | None = None,
        *,
        peft_config: Any = None,
        server_failure: Callable[[], str | None] = lambda: None,
        agents: Agents | None = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else self.config_class()
        check_arguments(args, self.config_class)
        check_reward_funcs(reward_funcs)
        model = load(model, peft_config, args.seed)
        check_model(model, args)
        check_tokenizer(kwargs.get("processing_class"))
        syncs_adapter = args.uses_server and hasattr(model, "disable_adapter")
        unreachable = rules.full_weights(args.uses_server, syncs_adapter, torch.cuda.is_available(), rules.in_python)
        if unreachable:
            raise ConfigError(unreachable)
        if agents is not None and not syncs_adapter:
            raise ConfigError("agents sample an adapter from a vLLM server. Set use_vllm and train an adapter.")
        if agents is not None and any(kwargs.get(name) for name in rules.INTERACTIVE):
            raise ConfigError("agents hold the conversations. Remove tools, environment_factory and rollout_func.")
        if args.disable_dropout:
            disable_dropout(model)
        for name in ("train_dataset", "eval_dataset"):
            check_rows(name, kwargs.get(name), args)
            kwargs |= {name: with_own_calls(kwargs[name])} if name in kwargs else {}
        self.is_interactive: bool = check_interactive(args, reward_funcs, kwargs)
        kwargs |= guarded(kwargs)
        reward_funcs = run_in_workers(reward_funcs, args.reward_num_workers, args.reward_timeout, self._group_size)
        if args.streaming_partial_batch and args.reward_num_workers == 1:
            reward_funcs = run_in_chunks(reward_funcs, args.streaming_min_groups, self._group_size)
        in_memory = args.beta > 0 and not hasattr(model, "disable_adapter") and not model.config.name_or_path
        with _named(model) if in_memory else nullcontext():
            super().__init__(model, checked_functions(reward_funcs), _for_trl(args, syncs_adapter), **kwargs)
        self.args = args
        check_version(self.accelerator, args.uses_server)
        keep_output_dtype(self.accelerator)
        for scored in (model, self.ref_model):
            if scored is not None:
                backbone_of(unwrap_adapter(scored)).register_forward_pre_hook(_positions_from_mask, with_kwargs=True)
        check_reference_model(model, self.ref_model)
        check_reward_templates(self.reward_funcs, self.reward_processing_classes, self.train_dataset)
        self.prepare_sharing()
        self._throughput = Throughput()
        self.scored_rollouts: ScoredRollouts = ScoredRollouts(self)
        self.prepare_second_uses()
        self.prepare_rollouts(agents, syncs_adapter, server_failure)

    def count_completions(self, prompts: list[list[int]], completions: list[list[int]], sampled: Any) -> None:
        """Update throughput and budget; `sampled` marks the sampled tokens of completions, None if all are sampled."""
        generated = sum(map(len, completions)) if sampled is None else sum(map(sum, sampled))
        for counter in (self._throughput, self.budget):
            counter.add(documents=len(prompts) / self.num_generations, generated_tokens=generated)
        if self.use_vllm:  # not visible to the meter; counts every prompt once per sample, ignoring prefix caching
            tokens = sum(map(len, prompts)) + sum(map(len, completions))
            self.budget.add(flops=forward_flops(self.model, tokens, scored=generated))

    def computing_models(self) -> list[nn.Module]:
        """Return the policy, the reference model and the reward models."""
        rewards = [f.network.causal_lm if isinstance(f, FeatureMatchingReward) else f for f in self.reward_funcs]
        return [model for model in (self.model, self.ref_model, *rewards) if isinstance(model, nn.Module)]

    def before_rewards(self) -> None:
        self._rewards_started = time.perf_counter()
        for func in self.reward_funcs:
            if isinstance(func, FeatureMatchingReward):
                func.num_generations = self._group_size()

    def add_to_inputs(self, rows: list[Row], inputs: dict[str, Any]) -> dict[str, Any]:
        # TRL's advantages of equal rewards are not exactly 0 but rounding errors, which Adam would scale up.
        inputs = inputs | {"advantages": inputs["advantages"].masked_fill(self._without_signal(rows), 0.0)}
        if self.server is not None and self.model.training:
            found = self.server.check_samples(inputs, *self.sampled_from, lambda count: self.first_logps(inputs, count))
            self.log_mean("train", "sampling/logp_diff", found.mean)
            self.log_mean("train", "sampling/raw_ratio_mean", found.ratio_mean)
            self.log_mean("train", "sampling/raw_ratio_max", found.ratio_max)
        return inputs

    def _without_signal(self, rows: list[Row]) -> Tensor:
        """Return which of this process's completions (B,) are in a group whose rewards are all equal.

        These are the weighted totals, up to rounding, or, if they are normalised first, those of every function.
        Completions without a reward do not count.
        """
        first, n = self.accelerator.process_index * len(rows), self._group_size()
        values = self.rewards[first : first + len(rows)]  # (B, functions)
        rounding = 0.0
        if self.multi_objective_aggregation == "sum_then_normalize" and values.shape[1] > 1:
            weighted = values * self.reward_weights.to(values)
            values = weighted.nansum(-1, keepdim=True).masked_fill(values.isnan().all(-1, keepdim=True), math.nan)
            sizes = weighted.abs().nansum(-1).view(-1, n).amax(-1, keepdim=True)  # (groups, 1)
            rounding = torch.finfo(values.dtype).eps * weighted.shape[1] * sizes
        groups = values.view(-1, n, values.shape[1])
        highest, lowest = groups.nan_to_num(-math.inf).amax(1), groups.nan_to_num(math.inf).amin(1)
        return (highest - lowest <= rounding).all(-1).repeat_interleave(n)

    def after_inputs(self, rows: list[Row], inputs: dict[str, Any]) -> dict[str, Any]:
        if not self.model.training:
            return inputs
        first = self.accelerator.process_index * len(rows)
        rewards = self.rewards[first : first + len(rows)]
        totals = (rewards * self.reward_weights.to(rewards)).nansum(-1)
        self.scored_rollouts(partial(self._logged_groups, rows, rewards, totals, inputs["advantages"]), totals)
        self.note_failed(rows, totals)
        return self.with_replayed(inputs)

    def _logged_groups(
        self, rows: list[Row], rewards: Tensor, totals: Tensor, advantages: Tensor
    ) -> Iterator[dict[str, Any]]:
        """Yield one entry of the log of rollouts per prompt.

        Takes rewards (B, functions), their weighted totals (B,) and advantages (B,).
        """
        n, completed = self.num_generations, self.state.global_step
        rewards, totals, advantages = rewards.tolist(), totals.tolist(), advantages.tolist()
        for start in range(0, len(rows), n):
            row = rows[start]
            yield {
                "step": completed + 1,
                "weights_step": self.sampled_from[1],
                "staleness": completed - self.sampled_from[1],
                **{key: row[key] for key in CONVERSATION if row.get(key) is not None},
                "samples": [
                    {
                        "replies": self.text_tokenizer.batch_decode(self.rollouts[index].replies),
                        "tokens": sum(self.rollouts[index].generated),
                        "reward": totals[index],
                        "rewards": {
                            name: None if math.isnan(value) else value
                            for name, value in zip(_distinct(self.reward_func_names), rewards[index])
                        },
                        **self._terms_of(index),
                        "advantage": advantages[index],
                    }
                    for index in range(start, start + n)
                ],
            }

    def _terms_of(self, index: int) -> dict[str, float]:
        """Return the terms of the reward of a completion, by name."""
        return {}

    def after_rewards(self, rows: list[Row], rewards: Tensor) -> Tensor:
        mode = "train" if self.model.training else "eval"
        self.log_mean(mode, "rollouts/reward_s", time.perf_counter() - self._rewards_started)
        infinite = rewards.isinf().any(0).nonzero().flatten().tolist()
        if infinite:
            names = ", ".join(self.reward_func_names[index] for index in infinite)
            raise NonFiniteLossError(
                f"The reward {names} is infinite. Reward functions must return finite numbers, or None for no reward."
            )
        self.rewards = rewards
        return rewards

    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.is_fsdp_enabled and not is_sharded(self.model):
            raise ConfigError("With FSDP2, train() shards the model. Call it before evaluate(), or remove fsdp.")
        if self.args.eval_batch_size % self.num_generations_eval:
            raise ConfigError(
                f"per_device_eval_batch_size ({self.args.eval_batch_size}) must be a multiple of "
                f"{self.num_generations_eval} (num_generations_eval, or num_generations)."
            )
        with torch.random.fork_rng():  # completions of an evaluation must not change those of training after it
            return super().evaluate(*args, **kwargs)

    # Prefetching

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | None = None) -> Tensor:
        if self._prefetcher is not None:
            self._prefetcher.raise_failure()
        started = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._throughput.add(seconds=time.perf_counter() - started)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the throughput since the last call added; documents are prompts."""
        if self.model.training and "loss" in logs:
            logs |= self._throughput.drain(self.accelerator)
        prints, self.log_completions = self.log_completions, self.log_completions and "train_runtime" not in logs
        super().log(logs, start_time)  # the completions of the last step were printed before the summary of the run
        self.log_completions = prints

    # Loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        if self._has_no_signal(inputs):
            self.log_mean("train", "skipped_zero_adv_batches", 1.0)
            return torch.zeros((), device=self.args.device, requires_grad=True)
        if self.args.skip_zero_advantage_batches and self.model.training:
            self.log_mean("train", "skipped_zero_adv_batches", 0.0)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _has_no_signal(self, inputs: dict[str, Any]) -> bool:
        """Whether this micro-batch can be skipped; the result is the same on all processes.

        Not possible if processes exchange gradients in it, or with fp16, whose gradient scaler requires gradients.
        """
        if not (self.args.skip_zero_advantage_batches and self.model.training) or self.args.fp16:
            return False
        if self.accelerator.num_processes > 1 and self.accelerator.sync_gradients:
            return False
        signal = inputs["advantages"].abs().sum() + self._signal_besides(inputs)
        return self.accelerator.gather(signal.reshape(1)).sum().item() == 0

    def _signal_besides(self, inputs: dict[str, Any]) -> float:
        """Return a positive value if the loss has terms that do not depend on the advantages."""
        return float(self.beta != 0.0 or self.aux_loss_enabled or self.has_entropy_bonus)


def _positions_from_mask(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook: set position ids that do not count padding, as in sampling. TRL counts left padding.

    This changes the results of models with learned positions, but not of models with relative positions.
    """
    mask = kwargs.get("attention_mask")
    takes_positions = "position_ids" in inspect.signature(module.forward).parameters
    if takes_positions and kwargs.get("position_ids") is None and isinstance(mask, Tensor) and mask.dim() == 2:
        tokens = args[0] if args else kwargs["input_ids"]
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
    return args, kwargs


def _distinct(names: list[str]) -> list[str]:
    """Return the names, with a number after those that have occurred before."""
    return [name if name not in names[:i] else f"{name} {names[:i].count(name) + 1}" for i, name in enumerate(names)]


@contextmanager
def _named(model: PreTrainedModel) -> Iterator[None]:
    """Give a model that was built in memory a name inside the block, by which TRL loads the reference model."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.config.name_or_path = folder
        try:
            yield
        finally:
            model.config.name_or_path = ""


def _for_trl(args: RolloutGRPOConfig, syncs_adapter: bool) -> RolloutGRPOConfig:
    """Return the arguments for TRL, which has no managed servers and supports servers with weight transfer only."""
    changed = copy.copy(args)
    changed.use_vllm = args.use_vllm and not syncs_adapter
    changed.vllm_mode = "server" if args.uses_server else args.vllm_mode
    return changed
