"""RolloutGRPOTrainer: TRL's GRPOTrainer with rollouts of full conversations from generate() or a vLLM server.

Rewards, advantages and the loss are TRL's. The trainer owns the parts that do the rest: `scorer` (scoring.py),
`generation` (generation.py), which also prefetches rollouts, and `reuse` (replay.py). TRL's steps call them through the
hooks of trl.py, here in the order of a step.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer import grpo_trainer

from ebft.config import rules
from ebft.data.json_files import with_own_calls
from ebft.errors import ConfigError
from ebft.models.causal_lm import backbone_of, frozen_copy, unwrap_adapter
from ebft.models.pretrained import disable_dropout, load
from ebft.models.sharding import check_version, check_whole, is_sharded, keep_output_dtype
from ebft.monitor import budget, metrics, run_files
from ebft.reward_functions import checked_reward, in_chunks, run_in_workers
from ebft.structured import config, replay, reward, scoring
from ebft.structured.generation import CONVERSATION, Generation, Prefetcher, ReadAhead, Row
from ebft.structured.rollouts import local, server, turns
from ebft.structured.trl import COMPLETIONS, HeldOutCompletions, OverTRL, positions_from_mask


class RolloutGRPOTrainer(OverTRL):
    """TRL's GRPOTrainer with completions that are generated turn by turn, each with a separate token limit.

    Rows contain `prompt` and the columns that the reward functions read; `remaining_turns` are generated in order.
    `rollout_func`, `tools` and `environment_factory` are as in TRL; all turns are sampled by `sample`.
    `rewards` (completions of all processes, functions) belong to the last batch, NaN for no reward.
    `scored_rollouts.hooks` are called with the rollouts of each batch and their total rewards (completions,).
    `server_failure` returns why a server started for this run failed permanently, or None if it has not. `agents` hold
    the conversations, if given; they sample an adapter from a vLLM server. `reference_limit`: how the longest
    reference limits the length of completions.
    """

    args: config.RolloutGRPOConfig
    rewards: Tensor
    log_completions: bool
    _was_named: bool = False  # whether the model was given as a name
    config_class: type[config.RolloutGRPOConfig] = config.RolloutGRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: config.RolloutGRPOConfig | None = None,
        *,
        peft_config: Any = None,
        server_failure: Callable[[], str | None] | None = None,
        agents: server.Agents | None = None,
        reference_limit: turns.ReferenceLimit | None = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else self.config_class()
        model = self.load_policy(model, peft_config, args, kwargs.pop("quantization_config", None))
        check_whole(model)
        syncs_adapter = args.uses_server and hasattr(model, "disable_adapter")
        has_cuda = torch.cuda.is_available()
        rules.refuse(rules.full_weights(args.uses_server, syncs_adapter, has_cuda, rules.in_python))
        if args.disable_dropout:
            disable_dropout(model)
        for name in [name for name in ("train_dataset", "eval_dataset") if name in kwargs]:
            is_ebft = isinstance(args, config.EBFTConfig)
            rows = config.with_references(kwargs[name]) if is_ebft else kwargs[name]
            config.check_rows(name, rows, args, needs_reference=is_ebft)
            kwargs[name] = with_own_calls(rows)
        funcs = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        is_interactive = config.check_interactive(args, funcs, kwargs)
        if kwargs.get("rollout_func") is not None:
            kwargs["rollout_func"] = config.checked(kwargs["rollout_func"])
        loads_rewards = any(isinstance(func, str) for func in funcs)
        funcs = run_in_workers(funcs, args.reward_num_workers, args.reward_timeout, self._group_size)
        if args.streaming_partial_batch and args.reward_num_workers == 1:
            funcs = [in_chunks(func, args.streaming_min_groups, self._group_size) for func in funcs]
        needs_reference = args.beta > 0 and not hasattr(model, "disable_adapter")
        with _reference_model(frozen_copy(model) if needs_reference else None):
            for_trl = copy.copy(args)  # TRL has no managed servers, and warns of used `model_init_kwargs`
            for_trl.model_init_kwargs = args.model_init_kwargs if loads_rewards or not self._was_named else None
            for_trl.use_vllm = args.use_vllm and not syncs_adapter
            for_trl.vllm_mode = "server" if args.uses_server else args.vllm_mode
            super().__init__(model, [checked_reward(func) for func in funcs], for_trl, **kwargs)
        self.args = args
        check_version(self.accelerator, args.uses_server)
        keep_output_dtype(self.accelerator)
        for scored in (model, self.ref_model):
            if scored is not None:
                backbone_of(unwrap_adapter(scored)).register_forward_pre_hook(positions_from_mask, with_kwargs=True)
        self._throughput = metrics.Throughput(self.budget)
        self.scored_rollouts: run_files.ScoredRollouts = run_files.ScoredRollouts(self)
        self.scorer: scoring.SharedPromptScorer = scoring.SharedPromptScorer(self)
        self.keeps_groups = self.scorer.shares_prompts
        self.reuse: replay.PromptReuse = replay.PromptReuse(self)
        self.generation: Generation = Generation(
            self, agents, is_interactive, reference_limit, syncs_adapter, server_failure or (lambda: None)
        )

    def load_policy(
        self, model: Any, peft_config: Any, args: config.RolloutGRPOConfig, quantization_config: Any = None
    ) -> nn.Module:
        """Return the model with an adapter if `peft_config` is given; a name is loaded as TRL does, in float32."""
        config.check_arguments(args)
        options = {"dtype": torch.float32, "trust_remote_code": args.trust_remote_code}
        options |= args.model_init_kwargs or {}
        options |= {} if quantization_config is None else {"quantization_config": quantization_config}
        self._was_named = self._was_named or isinstance(model, str)
        return load(model, peft_config, args.seed, options)

    @property
    def shares_prompts(self) -> bool:
        """Whether completions are scored, and sampled without a server, with shared prompts."""
        return self.scorer.shares_prompts

    @property
    def rollouts(self) -> list[turns.Rollout]:
        """The rollouts of this process in the current batch."""
        return self.generation.rollouts

    def computing_models(self) -> list[nn.Module]:
        """Return the policy, the reference model and the reward models."""
        rewards = [f.network.causal_lm if isinstance(f, reward.FeatureMatchingReward) else f for f in self.reward_funcs]
        return [model for model in (self.model, self.ref_model, *rewards) if isinstance(model, nn.Module)]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        depth, every = self.args.prefetch_depth, self.args.steps_per_generation * self.num_iterations
        if self.args.async_prefetch:
            self.generation.prefetcher = Prefetcher(depth, self.generation.job)

            def submit(rows: list[Row]) -> None:
                self.reuse.inject_failed(rows)
                self.generation.prefetcher.submit(rows)

            self._ahead: ReadAhead = ReadAhead(submit, every, depth)
        try:
            return super().train(*args, **kwargs)
        finally:
            self.generation.stop()
            self.reuse.restore(self.reuse.state())  # batches that were read ahead are not trained on

    # A step: rows are read, completions sampled and rewarded, advantages computed, and the loss is minimised

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | None = None) -> Tensor:
        if self.generation.prefetcher is not None:
            self.generation.prefetcher.raise_failure()
        return super().training_step(model, inputs, num_items_in_batch)

    def add_seconds(self, seconds: float) -> None:
        self._throughput.add(seconds)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Return the micro-batches of the next optimizer step; with `async_prefetch`, also read later ones ahead."""
        if self.generation.prefetcher is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        has_generated = self.generation_batch is not None
        batches = self._ahead.next(epoch_iterator, num_batches, self.trained_micro_batches, has_generated)
        return batches, self.items_of(batches, device)

    def take_rows(self, rows: list[Row]) -> None:
        """Receive the rows to generate completions for; `rollout_func` receives their prompts only."""
        if self.model.training:
            if self.generation.prefetcher is None:
                self.reuse.inject_failed(rows)
            self.reuse.begin_batch()
        self.generation.take(rows)

    def sample(self, prompt_ids: list[list[int]], max_tokens: int | None = None) -> list[turns.Completion]:
        """Sample one completion per prompt from the current policy; for `rollout_func`.

        Each is limited by `max_tokens`, `max_completion_length` if None, and the maximum sequence length; it is empty
        if its prompt leaves no space. `Completion.logps` are None if `generate()` samples. Raises ConfigError with
        colocated vLLM, and with FSDP2 without a server.
        """
        return self.generation.sample(prompt_ids, max_tokens)

    def backend(self) -> turns.Backend:
        """Return what samples from the current weights: the server, or the policy itself."""
        if self.generation.server is not None:
            return self.generation.server.backend()
        return local.HFBackend(self, self.generation.sampling, self.processing_class.pad_token_id)

    def after_generation(self, fields: list[Any]) -> list[Any]:
        """Return the fields of generation (prompts, completions at COMPLETIONS, ...) for the reward functions."""
        fields = self.generation.messages(fields)
        if self.model.training:
            self.count_completions(*fields[:COMPLETIONS])
        return fields

    def count_completions(self, prompts: list[list[int]], completions: list[list[int]], sampled: Any) -> None:
        """Update the budget; `sampled` marks the sampled tokens of completions, None if all are sampled."""
        generated = sum(map(len, completions)) if sampled is None else sum(map(sum, sampled))
        self.budget.add(documents=len(prompts) / self.num_generations, generated_tokens=generated)
        if self.use_vllm:  # not visible to the meter; counts every prompt once per sample, ignoring prefix caching
            tokens = sum(map(len, prompts)) + sum(map(len, completions))
            self.budget.add(flops=budget.forward_flops(self.model, tokens, scored=generated))

    def before_rewards(self) -> None:
        self._rewards_started = time.perf_counter()
        for func in self.reward_funcs:
            if isinstance(func, reward.FeatureMatchingReward):
                func.num_generations = self._group_size()

    def after_rewards(self, rows: list[Row], rewards: Tensor) -> Tensor:
        """Return the rewards of the completions of all processes: (completions, functions). `rows` are this one's."""
        mode = "train" if self.model.training else "eval"
        self.log_mean(mode, "rollouts/reward_s", time.perf_counter() - self._rewards_started)
        self.rewards = rewards
        return rewards

    def add_to_inputs(self, rows: list[Row], inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the loss, computed from `rows` and their completions."""
        # TRL's advantages of equal rewards are not exactly 0 but rounding errors, which Adam would scale up.
        advantages = inputs["advantages"].masked_fill(self._without_signal(rows), 0.0)
        # Those of infinite rewards, which a reward model may give, are 0 in TRL; the loss has to show them.
        inputs = inputs | {"advantages": advantages.masked_fill(self.rewards.isinf().any(), math.nan)}
        if self.generation.server is not None and self.model.training:
            version, step = self.generation.sampled_from
            score = lambda count: self.first_logps(inputs, count)
            found = self.generation.server.check_samples(inputs, version, step, score)
            self.log_mean("train", "sampling/logp_diff", found.mean)
            self.log_mean("train", "sampling/raw_ratio_mean", found.ratio_mean)
            self.log_mean("train", "sampling/raw_ratio_max", found.ratio_max)
        return inputs

    def after_inputs(self, rows: list[Row], inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs to train on, given the complete inputs of the loss for these rows."""
        if not self.model.training:
            return inputs
        rewards = of_this_process(self.accelerator, self.rewards, rows)
        totals = (rewards * self.reward_weights.to(rewards, non_blocking=True)).nansum(-1)
        self.scored_rollouts(partial(self._logged_groups, rows, rewards, totals, inputs["advantages"]), totals)
        self.reuse.note_failed(rows, totals)
        return self.reuse.with_replayed(inputs)

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

    def add_to_loss(self, model: nn.Module, inputs: dict[str, Any], loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, given TRL's loss."""
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the trainer's own metrics and the throughput since the last call added; documents are prompts."""
        logs |= self.own_metrics()
        if not self.model.training:
            self.log_held_out(logs)
        elif "loss" in logs:
            logs |= self._throughput.drain(self.accelerator)
        self.make_logs_printable()
        prints, self.log_completions = self.log_completions, self.log_completions and "train_runtime" not in logs
        super().log(logs, start_time)  # the completions of the last step were printed before the summary of the run
        self.log_completions = prints

    def own_metrics(self) -> dict[str, float]:
        """Return the metrics of training, or of an evaluation, since the last log, in addition to TRL's."""
        return {}

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        if self.is_fsdp_enabled and not is_sharded(self.model):
            raise ConfigError("With FSDP2, train() shards the model. Call it before evaluate(), or remove fsdp.")
        if self.args.eval_batch_size % self.num_generations_eval:
            raise ConfigError(
                f"per_device_eval_batch_size ({self.args.eval_batch_size}) must be a multiple of "
                f"{self.num_generations_eval} (num_generations_eval, or num_generations)."
            )
        self.held_out_completions = HeldOutCompletions(metric_key_prefix)
        with torch.random.fork_rng():  # completions of an evaluation must not change training after it
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def running_state(self) -> dict[str, Any]:
        return super().running_state() | self.reuse.state()

    def restore_running_state(self, state: dict[str, Any]) -> None:
        super().restore_running_state(state)
        self.reuse.restore(state)

    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _without_signal(self, rows: list[Row]) -> Tensor:
        """Whether all totals of a completion's group, or its rewards of each function, are equal: (B,)."""
        n, rounding = self._group_size(), 0.0  # NaN, for no reward, does not count
        values = of_this_process(self.accelerator, self.rewards, rows)  # (B, functions)
        if self.multi_objective_aggregation == "sum_then_normalize" and values.shape[1] > 1:
            weighted = values * self.reward_weights.to(values, non_blocking=True)
            values = weighted.nansum(-1, keepdim=True).masked_fill(values.isnan().all(-1, keepdim=True), math.nan)
            sizes = weighted.abs().nansum(-1).view(-1, n).amax(-1, keepdim=True)  # (groups, 1)
            rounding = torch.finfo(values.dtype).eps * weighted.shape[1] * sizes
        groups = values.view(-1, n, values.shape[1])
        highest, lowest = groups.nan_to_num(-math.inf).amax(1), groups.nan_to_num(math.inf).amin(1)
        return (highest - lowest <= rounding).all(-1).repeat_interleave(n)

    def _has_no_signal(self, inputs: dict[str, Any]) -> bool:
        """Whether this micro-batch can be skipped; the result is the same on all processes. Not possible if processes
        exchange gradients in it, with fp16, whose gradient scaler requires gradients, or with DeepSpeed, which requires
        a loss with a graph."""
        needs_gradients = self.args.fp16 or self.is_deepspeed_enabled
        if not (self.args.skip_zero_advantage_batches and self.model.training) or needs_gradients:
            return False
        if self.accelerator.num_processes > 1 and self.accelerator.sync_gradients:
            return False
        signal = inputs["advantages"].abs().sum() + self._signal_besides(inputs)
        return self.accelerator.gather(signal.reshape(1)).sum().item() == 0

    def _signal_besides(self, inputs: dict[str, Any]) -> Tensor | float:
        """Return a positive value, a scalar, if the loss has terms that do not depend on the advantages."""
        return float(self.beta != 0.0 or self.aux_loss_enabled or self.has_entropy_bonus)

    def _logged_groups(
        self, rows: list[Row], rewards: Tensor, totals: Tensor, advantages: Tensor
    ) -> Iterator[dict[str, Any]]:
        """Yield an entry per prompt, given rewards (B, functions), weighted totals (B,) and advantages (B,)."""
        n, completed, weights_step = self.num_generations, self.state.global_step, self.generation.sampled_from[1]
        terms = self._terms()
        columns = [totals, advantages, *(value.to(totals) for value in terms.values()), *rewards.unbind(1)]
        totals, advantages, *columns = torch.stack(columns).tolist()  # one wait for all
        numbers = [self.reward_func_names[:i].count(name) + 1 for i, name in enumerate(self.reward_func_names)]
        names = [name if number == 1 else f"{name} {number}" for name, number in zip(self.reward_func_names, numbers)]
        for start in range(0, len(rows), n):
            row = rows[start]
            yield {
                "step": completed + 1,
                "weights_step": weights_step,
                "staleness": completed - weights_step,
                **{key: row[key] for key in CONVERSATION if row.get(key) is not None},
                "samples": [
                    {
                        "replies": self.text_tokenizer.batch_decode(self.rollouts[index].replies),
                        "tokens": sum(self.rollouts[index].generated),
                        "reward": totals[index],
                        "rewards": {
                            name: None if math.isnan(value) else value
                            for name, value in zip(names, (column[index] for column in columns[len(terms) :]))
                        },
                        **{name: column[index] for name, column in zip(terms, columns)},
                        "advantage": advantages[index],
                    }
                    for index in range(start, start + n)
                ],
            }

    def _terms(self) -> dict[str, Tensor]:
        """Return the terms of the rewards of this process's completions, (B,) each, by name."""
        return {}


def of_this_process(accelerator: Any, values: Tensor, rows: list[Row]) -> Tensor:
    """Return the entries of this process's `rows` among the values of all processes."""
    first = accelerator.process_index * len(rows)
    return values[first : first + len(rows)]


@contextmanager
def _reference_model(copied: nn.Module | None) -> Iterator[None]:
    """Let TRL take `copied`, the model before training, for its reference model inside the block. TRL would load it by
    the name in the configuration alone: at another revision, with another configuration, or not at all. The copy is
    made earlier, since later only the first process may have the weights (`frozen_copy`)."""
    load_reference = grpo_trainer.create_model_from_path
    grpo_trainer.create_model_from_path = lambda *args, **kwargs: copied
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = load_reference
