"""Generation of rollouts in structured mode: by the policy itself, a vLLM server, agents, or code of the user.

Rollouts are added through TRL's hooks: `rollout_func` generates the completions, `vllm_generation.sync_weights` sends
the weights to the server, and `get_batch_samples` reads ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ebft.data.conversation import Conversation, Renderer
from ebft.data.rendering import ROW_KWARGS, TOOLS
from ebft.errors import ConfigError, DataError, RolloutError
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.sharding import is_sharded
from ebft.structured.config import RolloutGRPOConfig
from ebft.structured.conversations import HasConversations, Row
from ebft.structured.interactive import rollouts_of
from ebft.structured.over_trl import COMPLETIONS, LOGPROBS
from ebft.structured.reading_ahead import ReadsAhead
from ebft.structured.reward import FeatureMatchingReward, end_token_ids
from ebft.structured.rollouts.agents import AgentJob, Agents
from ebft.structured.rollouts.backend import Backend, Completion, Sampling
from ebft.structured.rollouts.hf import HFBackend
from ebft.structured.rollouts.in_step import passes_in_step
from ebft.structured.rollouts.server_rollouts import ServerRollouts
from ebft.structured.rollouts.turns import Limits, Rollout, reply_messages, roll_out

REWARD = "rollout_reward"  # column with the rewards of agents' environments, for reward functions


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


class GeneratesRollouts(HasConversations, ReadsAhead):
    """A trainer with rollouts; `rows` and `rollouts` are those of the current batch.

    `is_interactive`: whether code of the user takes part (see ebft.structured.interactive). `samples_conversations`:
    whether completions follow the prompts of conversations; those of TRL and of agents follow the generation prompt.
    """

    is_interactive: bool = False
    samples_conversations: bool = False
    rollout_func: Any
    sampled_from: tuple[Any, int]  # version of the server's adapter, if any, and the step of the weights

    def prepare_rollouts(
        self, agents: Agents | None, syncs_adapter: bool, server_failure: Callable[[], str | None]
    ) -> None:
        """Create what generates rollouts: the connection to a server, or agents; the policy itself needs nothing."""
        args = self.args
        self.renderer: Renderer = Renderer(self.processing_class, self.chat_template_kwargs, self.tools)
        self.sampling: Sampling = _sampling(args, end_token_ids(self.model, self.renderer))
        self.eos_token_ids: list[int] = sorted(self.sampling.end_ids)  # TRL detects truncated completions with these
        self.rows: list[Row] = []
        self.rollouts: list[Rollout] = []
        self.prepare_reading()
        self.server: ServerRollouts | None = None
        self._agents = agents
        if args.uses_server:
            self.server = ServerRollouts(
                args,
                self.model,
                self.processing_class,
                self.accelerator,
                self.sampling,
                base_model=unwrap_adapter(self.model).config.name_or_path,
                scores_truncated=self.scores_truncated,
                step=lambda: self.state.global_step,
                failure=server_failure,
                transfer=None if syncs_adapter else self.vllm_generation,
            )
            self.sync_before_rollouts(self.server)
        if (args.uses_server or not args.use_vllm) and not self.is_interactive:
            self.rollout_func = lambda prompts, trainer: self._rollout_fields()
            self.samples_conversations = agents is None
        for func in self.reward_funcs:
            if isinstance(func, FeatureMatchingReward):
                func.renderer = self.renderer  # with TRL's tools, and the conversations rendered for rollouts
                func.follows_generation_prompt = not self.samples_conversations

    def take_rows(self, rows: list[Row]) -> None:
        if self._prefetcher is None and self.model.training:
            self.inject_failed(rows)
        self._check_columns(rows)
        self.rows = rows
        self.sampled_from, self._sampling_s = (None, self.state.global_step), 0.0
        self._generation_started = time.perf_counter()

    def _check_columns(self, rows: list[Row]) -> None:
        given = {name for row in rows for name in (TOOLS, ROW_KWARGS) if row.get(name)}
        if given and not self.samples_conversations and self._agents is None:
            raise ConfigError(
                f"the rows have {' and '.join(sorted(given))}, but with vllm_mode: colocate, tools, "
                "environment_factory and rollout_func, TRL renders the prompts without them. Remove the columns, or "
                "use vllm_mode: managed or server."
            )

    def sample(self, prompt_ids: list[list[int]], max_tokens: int | None = None) -> list[Completion]:
        """Sample one completion per prompt from the current policy; for `rollout_func`.

        Each is limited by `max_tokens`, `max_completion_length` if None, and the maximum sequence length; it is empty
        if its prompt leaves no space. `Completion.logps` are None if `generate()` samples. Raises ConfigError with
        colocated vLLM, and with FSDP2 without a server.
        """
        if not all(isinstance(ids, list) and ids for ids in prompt_ids):
            raise RolloutError("trainer.sample takes a list with the token ids of each prompt, each a non-empty list.")
        if self.use_vllm and self.server is None:
            raise ConfigError("trainer.sample is not supported with vllm_mode: colocate. Use vllm_mode: managed.")
        if self.server is not None and not self.model.training:
            self.server.sync_weights(at_once=True)  # evaluate the current weights
        if self.server is None and is_sharded(self.model):
            raise ConfigError(
                "trainer.sample is not supported with FSDP2, whose processes must sample equally many turns. Use a "
                "vLLM server."
            )
        limits = self._limits()
        longest = limits.max_completion_length if max_tokens is None else max_tokens
        max_new = [min(longest, limits.room(len(ids))) for ids in prompt_ids]
        fits = [index for index, count in enumerate(max_new) if count > 0]
        found = [Completion([], None if self.server is None else [])] * len(prompt_ids)
        if not fits:
            return found
        started, backend = time.perf_counter(), self._backend()
        sampled = backend.generate([prompt_ids[index] for index in fits], [max_new[index] for index in fits])
        for index, completion in zip(fits, sampled, strict=True):
            found[index] = completion
        step = self.server.weights_step if self.server is not None else self.state.global_step
        self.sampled_from = getattr(backend, "version", None), step
        if self.server is not None:
            self.server.release(backend)
        self._sampling_s += time.perf_counter() - started
        return found

    def sample_turn(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None] | None:
        if self.use_vllm and self.server is None:
            return None  # TRL's colocated vLLM
        self.sync_if_outdated()
        is_first = self._sampling_s == 0
        completions = self.sample(prompt_ids)
        if is_first and not all(completion.ids for completion in completions):
            longest = max(map(len, prompt_ids))
            raise DataError(
                f"a prompt of {longest} tokens, with its tools, leaves no space for a completion within the maximum "
                "sequence length. Remove such rows, or increase vllm.max_model_len."
            )
        logps = None if self.server is None else [completion.logps for completion in completions]
        return [completion.ids for completion in completions], logps

    def _rollout_fields(self) -> dict[str, Any]:
        """Return the rollouts of the current rows, in the format of TRL's rollout_func."""
        job, self.rollouts = self._finished_rollouts()
        self.sampled_from = getattr(job.backend, "version", None), job.weights_step
        self._sampling_s = job.seconds
        logps = [rollout.logps for rollout in self.rollouts]
        fields = {
            "prompt_ids": [rollout.prompt_ids for rollout in self.rollouts],
            "completion_ids": [rollout.ids for rollout in self.rollouts],
            "logprobs": None if self.server is None else logps,
        }
        if any(0 in rollout.generated for rollout in self.rollouts):
            fields["env_mask"] = [rollout.generated for rollout in self.rollouts]
        if self._agents is not None:
            fields[REWARD] = [rollout.reward for rollout in self.rollouts]
        return fields

    def _finished_rollouts(self) -> tuple[RolloutJob | AgentJob, list[Rollout]]:
        if self._prefetcher is not None and self.model.training:
            job, rollouts = self._prefetcher.take(self.rows)
        else:
            if self.server is not None and not self.model.training:
                self.server.sync_weights(at_once=True)  # evaluate the current weights
            job = self._job(self.rows)
            with nullcontext() if self.server is not None else passes_in_step(self.model, self.accelerator):
                rollouts = job.run()
        if self.server is not None:
            self.server.release(job.backend)
        return job, rollouts

    def _job(self, rows: list[Row]) -> RolloutJob | AgentJob:
        """Return the job that samples the rows' conversations from the current weights."""
        if self._agents is not None:
            return AgentJob(
                self._agents, rows, self.server.backend(), self.max_completion_length, self.server.weights_step
            )
        return RolloutJob(
            backend=self._backend(),
            conversations=self.conversations(rows),
            limits=self._limits(),
            end_ids=self.sampling.end_ids,
            weights_step=self.server.weights_step if self.server is not None else self.state.global_step,
        )

    def _backend(self) -> Backend:
        if self.server is not None:
            return self.server.backend()
        return HFBackend(self, self.sampling, self.processing_class.pad_token_id)

    def after_generation(self, fields: list[Any]) -> list[Any]:
        """Convert completions with several turns to messages for the reward functions."""
        mode = "train" if self.model.training else "eval"
        self.log_mean(mode, "rollouts/wait_s", time.perf_counter() - self._generation_started)
        self.log_mean(mode, "rollouts/generation_s", self._sampling_s)
        if self.server is not None:
            self.log_mean(mode, "rollouts/staleness", self.state.global_step - self.sampled_from[1])
        if self.model.training:
            self.count_completions(*fields[:COMPLETIONS])
        if self.is_interactive:  # TRL has made messages of them
            self.rollouts = rollouts_of(*fields[:COMPLETIONS], fields[LOGPROBS])
        elif any(len(rollout.replies) > 1 for rollout in self.rollouts):
            fields[COMPLETIONS] = [
                reply_messages(self.text_tokenizer, rollout, row.get("remaining_turns"))
                if self._agents is None
                else [{"role": "assistant", "content": text} for text in self._texts(rollout)]
                for rollout, row in zip(self.rollouts, self.rows)
            ]
        return fields

    def _texts(self, rollout: Rollout) -> list[str]:
        return self.text_tokenizer.batch_decode(rollout.replies, skip_special_tokens=True)

    def count_completions(
        self, prompts: list[list[int]], completions: list[list[int]], sampled: list[list[int]] | None
    ) -> None:
        """Receive the token ids of a batch of training; `sampled` is 1 at sampled tokens, None if all are sampled."""


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
