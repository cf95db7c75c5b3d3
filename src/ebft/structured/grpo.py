"""RolloutGRPOTrainer: TRL's GRPOTrainer with rollouts of full conversations from generate() or a vLLM server.

Rewards, advantages and the loss are TRL's. Rollouts are added through TRL's hooks: `rollout_func` generates the
completions, `vllm_generation.sync_weights` sends the weights to the server, and `get_batch_samples` reads ahead.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ebft.config import rules
from ebft.data.conversation import Conversation, Renderer
from ebft.errors import ConfigError, DataError, NonFiniteLossError
from ebft.models.causal_lm import backbone_of, unwrap_adapter
from ebft.models.sharding import check_version, is_sharded, keep_output_dtype
from ebft.models.trainable import disable_dropout, load
from ebft.monitor.budget import CountsBudget
from ebft.monitor.finite import StopOnNonFinite
from ebft.monitor.flops import forward_flops
from ebft.monitor.rollout_log import ScoredRollouts
from ebft.monitor.throughput import Throughput
from ebft.structured.config import RolloutGRPOConfig
from ebft.structured.interactive import check_interactive, checked, rollouts_of
from ebft.structured.over_trl import COMPLETIONS, LOGPROBS
from ebft.structured.replay import UsesPromptsAgain
from ebft.structured.reward import FeatureMatchingReward, end_token_ids
from ebft.structured.reward_workers import run_in_chunks, run_in_workers
from ebft.structured.rollouts.agents import AgentJob, Agents
from ebft.structured.rollouts.backend import Backend, Completion, Sampling
from ebft.structured.rollouts.hf import HFBackend
from ebft.structured.rollouts.in_step import passes_in_step
from ebft.structured.rollouts.prefetch import Prefetcher
from ebft.structured.rollouts.server_rollouts import ServerRollouts
from ebft.structured.rollouts.turns import Limits, ReferenceLimit, Rollout, reply_messages, roll_out
from ebft.structured.validation import (
    check_arguments,
    check_model,
    check_reference_model,
    check_rows,
    check_tokenizer,
)

Row = dict[str, Any]
REWARD = "rollout_reward"  # column with the rewards of agents' environments, for reward functions
_CONVERSATION = ("prompt", "ground_truth", "remaining_turns")


@dataclass
class RolloutJob:
    """The inputs for the rollouts of some rows, fixed when the job is created; `run` may be called on any thread."""

    backend: Backend
    conversations: list[Conversation]
    limits: Limits
    end_ids: Collection[int]
    weights_step: int  # the optimizer step of the weights used for sampling
    seconds: float = 0.0  # duration of `run`

    def run(self) -> list[Rollout]:
        started = time.perf_counter()
        rollouts = roll_out(self.backend, self.conversations, self.limits, self.end_ids)
        self.seconds = time.perf_counter() - started
        return rollouts


class RolloutGRPOTrainer(CountsBudget, StopOnNonFinite, UsesPromptsAgain):
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
        self._is_interactive = check_interactive(args, reward_funcs, kwargs)
        self.samples_turns = self._is_interactive and (args.uses_server or not args.use_vllm)
        if kwargs.get("rollout_func") is not None:
            kwargs["rollout_func"] = checked(kwargs["rollout_func"])
        reward_funcs = run_in_workers(reward_funcs, args.reward_num_workers, args.reward_timeout, self._group_size)
        if args.streaming_partial_batch and args.reward_num_workers == 1:
            reward_funcs = run_in_chunks(reward_funcs, args.streaming_min_groups, self._group_size)
        super().__init__(model, reward_funcs, _for_trl(args, syncs_adapter), **kwargs)
        self.args = args
        check_version(self.accelerator, self.ref_model, args.uses_server)
        keep_output_dtype(self.accelerator)
        for scored in (model, self.ref_model):
            if scored is not None:
                backbone_of(unwrap_adapter(scored)).register_forward_pre_hook(_positions_from_mask, with_kwargs=True)
        check_reference_model(model, self.ref_model)
        self.prepare_sharing()
        self.renderer = Renderer(self.processing_class, self.chat_template_kwargs)
        self.sampling = _sampling(args, end_token_ids(model, self.renderer))
        self.eos_token_ids = sorted(self.sampling.end_ids)  # TRL detects truncated completions with these
        self._rows: list[Row] = []
        self._rollouts: list[Rollout] = []
        self._throughput = Throughput()
        self.scored_rollouts = ScoredRollouts(args)
        self.prepare_second_uses()
        self._ahead: deque[list[Row]] = deque()  # micro-batches that were read ahead
        self._epoch_iterator: Any = None
        self._read = 0  # number of micro-batches read; `trained_micro_batches` counts those trained on
        self._prefetcher: Prefetcher[list[Row], list[Rollout]] | None = None
        self._server: ServerRollouts | None = None
        self._agents = agents
        if args.uses_server:
            self._server = ServerRollouts(
                args,
                model,
                self.processing_class,
                self.accelerator,
                self.sampling,
                base_model=unwrap_adapter(model).config.name_or_path,
                scores_truncated=self.scores_truncated,
                step=lambda: self.state.global_step,
                failure=server_failure,
                transfer=None if syncs_adapter else self.vllm_generation,
            )
            self.sync_before_rollouts(self._server)
        if (args.uses_server or not args.use_vllm) and not self._is_interactive:
            self.rollout_func = lambda prompts, trainer: self._rollout_fields()

    # Rollouts

    def take_rows(self, rows: list[Row]) -> None:
        if self._prefetcher is None and self.model.training:
            self.inject_failed(rows)
        self._rows = rows
        self._sampled_from, self._sampling_s = (None, self.state.global_step), 0.0
        self._rollouts_started = time.perf_counter()

    def sample(self, prompt_ids: list[list[int]], max_tokens: int | None = None) -> list[Completion]:
        """Sample one completion per prompt from the current policy; for `rollout_func`.

        Each is limited by `max_tokens`, `max_completion_length` if None, and the maximum sequence length; it is empty
        if its prompt leaves no space. `Completion.logps` are None without a server. Raises ConfigError with colocated
        vLLM.
        """
        if self.use_vllm and self._server is None:
            raise ConfigError("trainer.sample is not supported with vllm_mode: colocate. Use vllm_mode: managed.")
        if self._server is not None and not self.model.training:
            self._server.sync_weights(at_once=True)  # evaluate the current weights
        if self._server is None and is_sharded(self.model):
            raise ConfigError(
                "trainer.sample is not supported with FSDP2, whose processes must sample equally many turns. Use a "
                "vLLM server."
            )
        limits = self._limits()
        longest = limits.max_completion_length if max_tokens is None else max_tokens
        max_new = [min(longest, limits.room(len(ids))) for ids in prompt_ids]
        fits = [index for index, count in enumerate(max_new) if count > 0]
        found = [Completion([], None if self._server is None else [])] * len(prompt_ids)
        if not fits:
            return found
        started, backend = time.perf_counter(), self._backend()
        sampled = backend.generate([prompt_ids[index] for index in fits], [max_new[index] for index in fits])
        for index, completion in zip(fits, sampled, strict=True):
            found[index] = completion
        step = self._server.weights_step if self._server is not None else self.state.global_step
        self._sampled_from = getattr(backend, "version", None), step
        if self._server is not None:
            self._server.release(backend)
        self._sampling_s += time.perf_counter() - started
        return found

    def sample_turn(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
        is_first = self._sampling_s == 0
        completions = self.sample(prompt_ids)
        if is_first and not all(completion.ids for completion in completions):
            longest = max(map(len, prompt_ids))
            raise DataError(
                f"a prompt of {longest} tokens, with its tools, leaves no space for a completion within the maximum "
                "sequence length. Remove such rows, or increase vllm.max_model_len."
            )
        logps = None if self._server is None else [completion.logps for completion in completions]
        return [completion.ids for completion in completions], logps

    def _rollout_fields(self) -> dict[str, Any]:
        """Return the rollouts of the current rows, in the format of TRL's rollout_func."""
        job, self._rollouts = self._finished_rollouts()
        self._sampled_from = getattr(job.backend, "version", None), job.weights_step
        self._sampling_s = job.seconds
        logps = [rollout.logps for rollout in self._rollouts]
        fields = {
            "prompt_ids": [rollout.prompt_ids for rollout in self._rollouts],
            "completion_ids": [rollout.ids for rollout in self._rollouts],
            "logprobs": None if self._server is None else logps,
        }
        if any(0 in rollout.generated for rollout in self._rollouts):
            fields["env_mask"] = [rollout.generated for rollout in self._rollouts]
        if self._agents is not None:
            fields[REWARD] = [rollout.reward for rollout in self._rollouts]
        return fields

    def _finished_rollouts(self) -> tuple[RolloutJob | AgentJob, list[Rollout]]:
        if self._prefetcher is not None and self.model.training:
            job, rollouts = self._prefetcher.take(self._rows)
        else:
            if self._server is not None and not self.model.training:
                self._server.sync_weights(at_once=True)  # evaluate the current weights
            job = self._job(self._rows)
            with nullcontext() if self._server is not None else passes_in_step(self.model, self.accelerator):
                rollouts = job.run()
        if self._server is not None:
            self._server.release(job.backend)
        return job, rollouts

    def _job(self, rows: list[Row]) -> RolloutJob | AgentJob:
        """Return the job that samples the rows' conversations from the current weights."""
        if self._agents is not None:
            return AgentJob(
                self._agents, rows, self._server.backend(), self.max_completion_length, self._server.weights_step
            )
        return RolloutJob(
            backend=self._backend(),
            conversations=self.conversations(rows),
            limits=self._limits(),
            end_ids=self.sampling.end_ids,
            weights_step=self._server.weights_step if self._server is not None else self.state.global_step,
        )

    def _backend(self) -> Backend:
        if self._server is not None:
            return self._server.backend()
        return HFBackend(self, self.sampling, self.processing_class.pad_token_id)

    def conversations(self, rows: list[Row]) -> list[Conversation]:
        """Return the rows' prompts and references as token ids; the adjacent samples of a group share one object."""
        found: list[Conversation] = []
        for index, row in enumerate(rows):
            if index and all(rows[index - 1].get(key) == row.get(key) for key in _CONVERSATION):
                found.append(found[-1])
            else:
                found.append(self._conversation(row))
        return found

    def _conversation(self, row: Row) -> Conversation:
        reference = row.get("ground_truth")
        if not isinstance(reference, str) or not self._compares_references():
            reference = ""  # with GRPO, ground_truth may be whatever a reward function accepts
        conversation = self.renderer.conversation(row["prompt"], reference, row.get("remaining_turns"))
        positions, length = self._positions(), len(conversation.prompt_ids) + len(conversation.reference_ids) + 1
        if positions is not None and length > positions and reference:
            raise DataError(
                f"a prompt of {len(conversation.prompt_ids)} tokens and its reference of "
                f"{len(conversation.reference_ids)} tokens plus the end token exceed the model's "
                f"max_position_embeddings ({positions}). Remove such rows."
            )
        return conversation

    def _compares_references(self) -> bool:
        """Whether a reward compares completions with their references, which must then fit the model."""
        return any(isinstance(func, FeatureMatchingReward) for func in self.reward_funcs)

    def _positions(self) -> int | None:
        return getattr(unwrap_adapter(self.model).config.get_text_config(), "max_position_embeddings", None)

    def _limits(self) -> Limits:
        lengths = [self._positions(), self._server.max_model_len if self._server is not None else None]
        return Limits(
            self.max_completion_length,
            self._reference_limit(),
            min((length for length in lengths if length is not None), default=None),
        )

    def _reference_limit(self) -> ReferenceLimit | None:
        """Return how references limit the length of completions; None, since GRPO does not require references."""
        return None

    def after_generation(self, fields: list[Any]) -> list[Any]:
        """Convert completions with several turns to messages for the reward functions."""
        mode = "train" if self.model.training else "eval"
        self.log_mean(mode, "rollouts/wait_s", time.perf_counter() - self._rollouts_started)
        self.log_mean(mode, "rollouts/generation_s", self._sampling_s)
        if self._server is not None:
            self.log_mean(mode, "rollouts/staleness", self.state.global_step - self._sampled_from[1])
        if self.model.training:
            self._count_completions(*fields[:COMPLETIONS])
        if self._is_interactive:  # TRL has made messages of them
            self._rollouts = rollouts_of(*fields[:COMPLETIONS], fields[LOGPROBS])
        elif any(len(rollout.replies) > 1 for rollout in self._rollouts):
            fields[COMPLETIONS] = [
                reply_messages(self.text_tokenizer, rollout, row.get("remaining_turns"))
                if self._agents is None
                else [{"role": "assistant", "content": text} for text in self._texts(rollout)]
                for rollout, row in zip(self._rollouts, self._rows)
            ]
        return fields

    def _texts(self, rollout: Rollout) -> list[str]:
        return self.text_tokenizer.batch_decode(rollout.replies, skip_special_tokens=True)

    def _count_completions(self, prompts: list[list[int]], completions: list[list[int]], sampled: Any) -> None:
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
        if self._server is not None and self.model.training:
            found = self._server.check_samples(
                inputs, *self._sampled_from, lambda count: self.first_logps(inputs, count)
            )
            self.log_mean("train", "sampling/logp_diff", found.mean)
            self.log_mean("train", "sampling/raw_ratio_mean", found.ratio_mean)
            self.log_mean("train", "sampling/raw_ratio_max", found.ratio_max)
        return inputs

    def after_inputs(self, rows: list[Row], inputs: dict[str, Any]) -> dict[str, Any]:
        if not self.model.training:
            return inputs
        first = self.accelerator.process_index * len(rows)
        rewards = self.rewards[first : first + len(rows)]
        totals = (rewards * self.reward_weights.to(rewards)).nansum(-1)
        self.scored_rollouts(partial(self._logged_groups, rows, rewards, inputs["advantages"]), totals)
        self.note_failed(rows, totals)
        return self.with_replayed(inputs)

    def _logged_groups(self, rows: list[Row], rewards: Tensor, advantages: Tensor) -> Iterator[dict[str, Any]]:
        """Yield one entry of the log of rollouts per prompt, given rewards (B, functions) and advantages (B,)."""
        n, step = self.num_generations, self.state.global_step
        rewards, advantages = rewards.tolist(), advantages.tolist()
        for start in range(0, len(rows), n):
            row = rows[start]
            yield {
                "step": step,
                "weights_step": self._sampled_from[1],
                "staleness": step - self._sampled_from[1],
                **{key: row[key] for key in _CONVERSATION if row.get(key) is not None},
                "samples": [
                    {
                        "replies": self.text_tokenizer.batch_decode(self._rollouts[index].replies),
                        "tokens": sum(self._rollouts[index].generated),
                        "rewards": dict(zip(self.reward_func_names, rewards[index])),
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

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.async_prefetch:
            self._prefetcher = Prefetcher(self.args.prefetch_depth, self._job)
        try:
            return super().train(*args, **kwargs)
        finally:
            self._stop_rollouts()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Return the micro-batches of the next optimizer step; with `async_prefetch`, also read later ones ahead."""
        if self.trained_micro_batches == 0:  # TRL restarts at 0 after resuming and would generate at the wrong steps
            self.trained_micro_batches = self.state.global_step * self.args.gradient_accumulation_steps
        if self._prefetcher is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if epoch_iterator is not self._epoch_iterator:
            self._epoch_iterator = epoch_iterator
            self._ahead.clear()
            self._read = self.trained_micro_batches
        every = self.args.steps_per_generation * self.num_iterations
        while len(self._ahead) < num_batches + self.args.prefetch_depth * every:
            rows = next(epoch_iterator, None)
            if rows is None:
                break
            is_first = self.generation_batch is None and self._read == self.trained_micro_batches
            if self._read % every == 0 or is_first:
                self.inject_failed(rows)
                self._prefetcher.announce(rows)
            self._ahead.append(rows)
            self._read += 1
        batches = [self._ahead.popleft() for _ in range(min(num_batches, len(self._ahead)))]
        return batches, self.items_of(batches, device)

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
        super().log(logs, start_time)

    def _stop_rollouts(self) -> None:
        """Cancel running rollouts and remove the adapters from the server; a later evaluation synchronises again."""
        if self._prefetcher is not None:
            self._prefetcher.close(self._cancel_rollouts)
            self._prefetcher = None
        self._ahead.clear()
        self._epoch_iterator = None
        if self._server is not None:
            self._server.reset()
            self.sync_anew()

    def _cancel_rollouts(self) -> None:
        if self._agents is not None:
            self._agents.cancel()
        self._server.client.cancel()

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


def _for_trl(args: RolloutGRPOConfig, syncs_adapter: bool) -> RolloutGRPOConfig:
    """Return the arguments for TRL, which has no managed servers and supports servers with weight transfer only."""
    changed = copy.copy(args)
    changed.use_vllm = args.use_vllm and not syncs_adapter
    changed.vllm_mode = "server" if args.uses_server else args.vllm_mode
    return changed


def _sampling(args: RolloutGRPOConfig, end_ids: set[int]) -> Sampling:
    extra = dict(args.generation_kwargs or {})
    return Sampling(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        end_ids=frozenset({*end_ids, *extra.pop("stop_token_ids", ())}),
        regex=args.vllm_structured_outputs_regex,
        extra=extra,
    )
