"""Generation of rollouts in structured mode: by the policy itself, a vLLM server, agents, or code of the user.

Rollouts are added through TRL's hooks: `rollout_func` generates the completions, `vllm_generation.sync_weights` sends
the weights to the server, and `get_batch_samples` reads ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ebft.data.conversation import Conversation, Renderer
from ebft.data.messages import REPLY, ROW_KWARGS, TOOLS
from ebft.errors import ConfigError, DataError, RolloutError
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.sharding import is_sharded
from ebft.structured.config import RolloutGRPOConfig
from ebft.structured.interactive import rollouts_of
from ebft.structured.replay import UsesPromptsAgain
from ebft.structured.reward import FeatureMatchingReward, end_token_ids
from ebft.structured.rollouts.local import HFBackend, passes_in_step
from ebft.structured.rollouts.server import AgentJob, Agents, ServerRollouts
from ebft.structured.rollouts.turns import (
    Backend,
    Completion,
    Limits,
    ReferenceLimit,
    Rollout,
    Sampling,
    reply_messages,
    roll_out,
)
from ebft.structured.trl import COMPLETIONS, LOGPROBS, OverTRL


class ReadsAhead(UsesPromptsAgain):
    """A trainer that reads micro-batches ahead of the step, and has their rollouts generated in the background."""

    server: ServerRollouts | None
    _agents: Agents | None

    def prepare_reading(self) -> None:
        """Start with nothing read."""
        self._ahead: deque[list[Row]] = deque()  # micro-batches that were read ahead
        self._epoch_iterator: Any = None
        self._read = 0  # number of micro-batches read; `trained_micro_batches` counts those trained on
        self._prefetcher: Prefetcher[list[Row], list[Rollout]] | None = None

    def _job(self, rows: list[Row]) -> Any:
        """Return the job that samples the rows' conversations from the current weights."""
        raise NotImplementedError

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.async_prefetch:
            self._prefetcher = Prefetcher(self.args.prefetch_depth, self._job)
        try:
            return super().train(*args, **kwargs)
        finally:
            self._stop_rollouts()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Return the micro-batches of the next optimizer step; with `async_prefetch`, also read later ones ahead."""
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

    def _stop_rollouts(self) -> None:
        """Cancel running rollouts and remove the adapters from the server; a later evaluation synchronises again."""
        if self._prefetcher is not None:
            self._prefetcher.close(self._cancel_rollouts)
            self._prefetcher = None
        self._ahead.clear()
        self._epoch_iterator = None
        if self.server is not None:
            self.server.reset()
            self.sync_anew()

    def _cancel_rollouts(self) -> None:
        if self._agents is not None:
            self._agents.cancel()
        self.server.client.cancel()


Row = dict[str, Any]
CONVERSATION = ("prompt", "ground_truth", "remaining_turns", TOOLS, REPLY, ROW_KWARGS)


class HasConversations(OverTRL):
    """A trainer that renders its rows; `server` is the one that generates, if any, and has a maximum length too."""

    renderer: Renderer
    server: ServerRollouts | None

    def conversations(self, rows: list[Row]) -> list[Conversation]:
        """Return the rows' prompts and references as token ids; the adjacent samples of a group share one object."""
        found: list[Conversation] = []
        for index, row in enumerate(rows):
            if index and all(rows[index - 1].get(key) == row.get(key) for key in CONVERSATION):
                found.append(found[-1])
            else:
                found.append(self._conversation(row))
        return found

    def _conversation(self, row: Row) -> Conversation:
        # With GRPO, ground_truth may be whatever a reward function accepts.
        compares = self._compares_references()
        conversation = self.renderer.of_row(row, compares)
        positions, length = self._positions(), len(conversation.prompt_ids) + len(conversation.reference_ids) + 1
        if positions is not None and length > positions and conversation.turns[0].reference_ids:
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
        lengths = [self._positions(), self.server.max_model_len if self.server is not None else None]
        return Limits(
            self.max_completion_length,
            self._reference_limit(),
            min((length for length in lengths if length is not None), default=None),
        )

    def _reference_limit(self) -> ReferenceLimit | None:
        """Return how references limit the length of completions; None, since GRPO does not require references."""
        return None


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


Batch = TypeVar("Batch")
Result = TypeVar("Result", covariant=True)


class Job(Protocol[Result]):
    """A job to run on the background thread."""

    def run(self) -> Result: ...


class Prefetcher(Generic[Batch, Result]):
    """Runs jobs in the order in which batches are announced, at most `depth` ahead of those taken.

    `prepare(batch)` creates the job on the calling thread when the job is started. It fixes the weights used for
    sampling, which therefore depend only on the order of calls.
    """

    def __init__(self, depth: int, prepare: Callable[[Batch], Job[Result]]) -> None:
        self._depth, self._prepare = depth, prepare
        self._announced: deque[Batch] = deque()
        self._started: deque[tuple[Batch, Job[Result], Future]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ebft-rollouts")

    def announce(self, batch: Batch) -> None:
        """Announce that `batch` will be taken, after all batches announced before it."""
        self._announced.append(batch)

    def take(self, batch: Batch) -> tuple[Job[Result], Result]:
        """Return the job of `batch`, the next one announced, and its result, after starting the next `depth` jobs.

        Raises RuntimeError if `batch` is not the next one announced.
        """
        self._start(self._depth + 1)
        if not self._started or self._started[0][0] is not batch:
            raise RuntimeError("batches must be taken in the order in which they were announced")
        _, job, future = self._started[0]
        result = future.result()
        self._started.popleft()
        return job, result

    def raise_failure(self) -> None:
        """Raise the exception of a started job that has failed, without waiting."""
        for *_, future in self._started:
            if future.done() and future.exception() is not None:
                raise future.exception()

    def close(self, cancel: Callable[[], Any]) -> None:
        """Discard all batches and stop the thread; `cancel` interrupts the running job."""
        self._announced.clear()
        running = {future for *_, future in self._started if not future.cancel()}
        while running:
            cancel()  # repeatedly, since a conversation may be between two turns
            running = wait(running, timeout=0.1).not_done
        self._executor.shutdown()
        self._started.clear()

    def _start(self, count: int) -> None:
        while self._announced and len(self._started) < count:
            batch = self._announced.popleft()
            job = self._prepare(batch)
            self._started.append((batch, job, self._executor.submit(job.run)))
