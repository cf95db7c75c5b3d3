"""The rollouts of a trainer in structured mode: by the policy itself, a vLLM server, agents, or code of the user.

Rollouts are added through TRL's hooks: `rollout_func` generates the completions, and `vllm_generation.sync_weights`
sends the weights to the server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from ebft.data.conversation import Conversation, Renderer, longest_reference
from ebft.data.messages import REPLY, ROW_KWARGS, TOOLS, as_texts
from ebft.errors import ConfigError, DataError, doing, warn
from ebft.models.causal_lm import end_token_ids, positions_of, unknown_ids
from ebft.models.sharding import is_sharded
from ebft.structured.config import STOPS
from ebft.structured.reward import FeatureMatchingReward
from ebft.structured.rollouts import local, server, turns
from ebft.structured.rollouts.turns import Backend, Completion, Rollout
from ebft.structured.trl import COMPLETIONS, IDS, LOGPROBS, PROMPTS, SAMPLED

Row = dict[str, Any]
Batch = list[Row]
CONVERSATION = ("prompt", "ground_truth", "remaining_turns", TOOLS, REPLY, ROW_KWARGS)
REWARD = "rollout_reward"  # column with the rewards of agents' environments, for reward functions


@dataclass
class RolloutJob:
    """What samples the rollouts of some rows, with weights that are fixed; `run` may be called on any thread."""

    sample: Callable[[], list[Rollout]]
    backend: Backend
    weights_step: int  # the optimizer step of the weights used for sampling
    seconds: float = 0.0  # duration of `run`

    def run(self) -> list[Rollout]:
        started = time.perf_counter()
        rollouts = self.sample()
        self.seconds = time.perf_counter() - started
        return rollouts


class Generation:
    """Generates the rollouts of a trainer; `rows` and `rollouts` belong to the current batch.

    `is_interactive`: whether code of the user takes part (see ebft.structured.config). `samples_conversations`:
    whether completions follow the prompts of conversations; completions of TRL and agents follow the generation prompt.
    `reference_limit`: how the longest reference limits the length of completions. `sampled_from`: the version of the
    server's adapter, if any, and the step of the weights. `prefetcher` is set while rollouts are generated ahead.
    """

    def __init__(
        self,
        trainer: Any,
        agents: server.Agents | None,
        is_interactive: bool,
        reference_limit: turns.ReferenceLimit | None,
        syncs_adapter: bool,
        server_failure: Callable[[], str | None],
    ) -> None:
        self._trainer, self._agents, args = trainer, agents, trainer.args
        self.is_interactive = is_interactive
        self.renderer: Renderer = Renderer(trainer.processing_class, trainer.chat_template_kwargs, trainer.tools)
        extra = dict(args.generation_kwargs or {})
        ends = end_token_ids(trainer.model, self.renderer.template.end_ids)
        self.sampling: turns.Sampling = turns.Sampling(
            **{name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
            end_ids=frozenset({*ends, *extra.pop(STOPS, ())}),
            regex=args.vllm_structured_outputs_regex,
            extra=extra,
            unknown=unknown_ids(trainer.model, trainer.processing_class),
        )
        unscored = [] if args.use_vllm else self.sampling.unscored(trainer.scorer.scores_truncated)
        if unscored:
            warn(
                f"{', '.join(unscored)}: completions are sampled with this, but scored at the temperature alone, so "
                "that gradients are biased. Remove it, or set use_vllm: true, whose log-probabilities correct it."
            )
        self.max_completion_length: int = trainer.max_completion_length
        if reference_limit is not None and not is_interactive and agents is None:
            longest = longest_reference(trainer.train_dataset, self.renderer)
            self.max_completion_length = reference_limit.of(longest, self.max_completion_length)
        self.rows: list[Row] = []
        self.rollouts: list[Rollout] = []
        self.sampled_from: tuple[Any, int] = (None, 0)
        self.prefetcher: Prefetcher | None = None
        self.server: server.ServerRollouts | None = None
        if args.uses_server:
            transfer = None if syncs_adapter else trainer.vllm_generation
            self.server = server.ServerRollouts(trainer, self.sampling, server_failure, transfer)
        samples_here = (args.uses_server or not args.use_vllm) and not is_interactive
        self.samples_conversations: bool = samples_here and agents is None
        # A reward that compares completions with their references needs references that fit the model.
        self._compares_references = False
        for func in trainer.reward_funcs:
            if isinstance(func, FeatureMatchingReward):
                self._compares_references = True
                func.renderer = self.renderer  # with TRL's tools, and the conversations rendered for rollouts
                func.follows_generation_prompt = not self.samples_conversations
                func.max_completion_length = self.max_completion_length
        trainer.eos_token_ids = sorted(self.sampling.end_ids)  # TRL detects truncated completions with these
        if self.server is not None:
            trainer.sync_before_rollouts(self.server)
        if samples_here:
            trainer.rollout_func = lambda prompts, trainer: self._fields()

    @property
    def _weights_step(self) -> int:
        """The optimizer step of the weights that sample now."""
        return self._trainer.state.global_step if self.server is None else self.server.weights_step

    # A batch: its rows are taken, sampled from the current weights, and given to the reward functions

    def take(self, rows: list[Row]) -> None:
        """Start with the rows of a new batch; their prompts are given to TRL without the keys that Arrow has added."""
        for row in rows:
            if not isinstance(row["prompt"], str):
                row["prompt"] = as_texts(row["prompt"])
        given = {name for row in rows for name in (TOOLS, ROW_KWARGS) if row.get(name)}
        if given and not self.samples_conversations and self._agents is None:
            raise ConfigError(
                f"the rows have {' and '.join(sorted(given))}, without which TRL renders prompts here. Remove these "
                "columns, or use vllm_mode: managed or server."
            )
        self.rows = rows
        self.sampled_from, self._sampling_s = (None, self._trainer.state.global_step), 0.0
        self._started = time.perf_counter()

    def _fields(self) -> dict[str, Any]:
        """Return the rollouts of the current rows, in the format of TRL's rollout_func."""
        is_training = self._trainer.model.training
        if self.prefetcher is not None and is_training:
            job, self.rollouts = self.prefetcher.result(self.rows)
        else:
            self._evaluate_current_weights()
            job = self.job(self.rows)
            trainer = self._trainer
            with local.lockstep(trainer.model_wrapped, trainer.accelerator) if self.server is None else nullcontext():
                self.rollouts = job.run()
        self._end(job.backend, job.weights_step, job.seconds)
        fields = {
            "prompt_ids": [rollout.prompt_ids for rollout in self.rollouts],
            "completion_ids": [rollout.ids for rollout in self.rollouts],
            "logprobs": None if self.server is None else [rollout.logps for rollout in self.rollouts],
        }
        if any(0 in rollout.generated for rollout in self.rollouts):
            fields["env_mask"] = [rollout.generated for rollout in self.rollouts]
        if self._agents is not None:
            fields[REWARD] = [rollout.reward for rollout in self.rollouts]
        return fields

    def _evaluate_current_weights(self) -> None:
        if self.server is not None and not self._trainer.model.training:
            self.server.sync_weights(at_once=True)

    def _end(self, backend: Backend, step: int, seconds: float) -> None:
        version = None
        if self.server is not None:
            version = backend.version
            self.server.release(backend)
        self.sampled_from = version, step
        self._sampling_s += seconds

    def job(self, rows: list[Row]) -> RolloutJob:
        """Return the job that samples the rows' conversations from the current weights."""
        backend = self._trainer.backend()
        if self._agents is not None:
            sample = partial(server.run_agents, self._agents, rows, backend, self.max_completion_length)
        else:
            conversations = self.conversations(rows)
            sample = partial(turns.roll_out, backend, conversations, self._limits(), self.sampling.end_ids)
        return RolloutJob(sample, backend, self._weights_step)

    def sample(self, prompt_ids: list[list[int]], max_tokens: int | None = None) -> list[Completion]:
        """See `RolloutGRPOTrainer.sample`."""
        trainer = self._trainer
        if self.server is None and (trainer.use_vllm or is_sharded(trainer.model)):
            raise ConfigError(
                "trainer.sample does not support vllm_mode: colocate, FSDP2 and ZeRO-3. Set vllm_mode: managed."
            )
        self._evaluate_current_weights()
        limits = self._limits()
        longest = limits.max_completion_length if max_tokens is None else max_tokens
        max_new = [min(longest, limits.room(len(ids))) for ids in prompt_ids]
        fits = [index for index, count in enumerate(max_new) if count > 0]
        found = [Completion([], None if self.server is None else [])] * len(prompt_ids)
        if not fits:
            return found
        started, backend = time.perf_counter(), trainer.backend()
        sampled = backend.generate([prompt_ids[index] for index in fits], [max_new[index] for index in fits])
        for index, completion in zip(fits, sampled, strict=True):
            found[index] = completion
        self._end(backend, self._weights_step, time.perf_counter() - started)
        return found

    def sample_turn(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None] | None:
        """Sample one turn of conversations in which TRL calls tools; None with TRL's colocated vLLM."""
        if self._trainer.use_vllm and self.server is None:
            return None
        self._trainer.sync_if_outdated()
        if self._sampling_s == 0:  # the first turn
            self._limits().check(prompt_ids)
        completions = self.sample(prompt_ids)
        logps = None if self.server is None else [completion.logps for completion in completions]
        return [completion.ids for completion in completions], logps

    def messages(self, fields: list[Any]) -> list[Any]:
        """Log times, and return TRL's fields with completions of several turns as messages for the rewards."""
        trainer = self._trainer
        mode = "train" if trainer.model.training else "eval"
        trainer.log_mean(mode, "rollouts/wait_s", time.perf_counter() - self._started)
        trainer.log_mean(mode, "rollouts/generation_s", self._sampling_s)
        if self.server is not None:
            trainer.log_mean(mode, "rollouts/staleness", trainer.state.global_step - self.sampled_from[1])
        tokenizer = trainer.text_tokenizer
        if self.is_interactive:  # TRL has made the messages
            self.rollouts = []
            for index, (prompt, ids) in enumerate(zip(fields[PROMPTS], fields[IDS], strict=True)):
                sampled = [1] * len(ids) if fields[SAMPLED] is None else fields[SAMPLED][index]
                runs = groupby(zip(sampled, ids), key=lambda pair: pair[0])  # adjacent sampled tokens are one reply
                replies = [[token for _, token in run] for is_sampled, run in runs if is_sampled]
                logps = None if fields[LOGPROBS] is None else fields[LOGPROBS][index]
                self.rollouts.append(Rollout(prompt, ids, sampled, logps, replies))
        elif any(len(rollout.replies) > 1 for rollout in self.rollouts):
            texts = lambda rollout: tokenizer.batch_decode(rollout.replies, skip_special_tokens=True)
            fields[COMPLETIONS] = [
                turns.reply_messages(tokenizer, rollout, row.get("remaining_turns"))
                if self._agents is None
                else [{"role": "assistant", "content": text} for text in texts(rollout)]
                for rollout, row in zip(self.rollouts, self.rows)
            ]
        return fields

    def stop(self) -> None:
        """Cancel running rollouts and remove the adapters from the server; a later evaluation synchronises again."""
        if self.prefetcher is not None:
            cancels = [*([self._agents.cancel] if self._agents else []), self.server.client.cancel]
            self.prefetcher.close(lambda: [cancel() for cancel in cancels])
            self.prefetcher = None
        if self.server is not None:
            self.server.reset()
            self._trainer.sync_anew()

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
        with doing(f"reading the row with the prompt {row['prompt']!r:.120}"):
            conversation = self.renderer.of_row(row, self._compares_references)
        positions, length = (
            positions_of(self._trainer.model),
            len(conversation.prompt_ids) + len(conversation.reference_ids) + 1,
        )
        if positions is not None and length > positions and conversation.turns[0].reference_ids:
            raise DataError(
                f"a prompt and its reference, {length} tokens, exceed max_position_embeddings ({positions}): "
                f"{row['prompt']!r:.120}"
            )
        return conversation

    def _limits(self) -> turns.Limits:
        lengths = [positions_of(self._trainer.model), self.server.max_model_len if self.server is not None else None]
        longest = min((length for length in lengths if length is not None), default=None)
        return turns.Limits(self.max_completion_length, longest)


class Prefetcher:
    """Runs jobs in the order in which batches are submitted, at most `depth` ahead of the one asked for.

    `prepare(batch)` creates the job on the calling thread when the job is started. It fixes the weights used for
    sampling, which therefore depend only on the order of calls.
    """

    def __init__(self, depth: int, prepare: Callable[[Batch], RolloutJob]) -> None:
        self._depth, self._prepare = depth, prepare
        self._submitted: deque[Batch] = deque()
        self._started: deque[tuple[Batch, RolloutJob, Future]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ebft-rollouts")

    def submit(self, batch: Batch) -> None:
        """Ask for the job of `batch`, after the jobs of all earlier batches."""
        self._submitted.append(batch)

    def result(self, batch: Batch) -> tuple[RolloutJob, list[Rollout]]:
        """Return the job of `batch`, the next one submitted, and its result, after starting the next `depth` jobs."""
        while self._submitted and len(self._started) <= self._depth:
            batch_to_start = self._submitted.popleft()
            job = self._prepare(batch_to_start)
            self._started.append((batch_to_start, job, self._executor.submit(job.run)))
        next_batch, job, future = self._started[0]
        assert next_batch is batch, "batches must be taken in the order in which they were submitted"
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
        self._submitted.clear()
        running = {future for *_, future in self._started if not future.cancel()}
        while running:
            cancel()  # repeatedly, since a conversation may be between two turns
            running = wait(running, timeout=0.1).not_done
        self._executor.shutdown()
        self._started.clear()


class ReadAhead:
    """Reads the micro-batches of later steps, and calls `submit` with each that completions are generated for.

    `every`: the micro-batches that are trained on the completions of one. `ahead`: how many generation batches
    are read in addition to the step's own micro-batches.
    """

    def __init__(self, submit: Callable[[Batch], None], every: int, ahead: int) -> None:
        self._submit, self._every, self._ahead = submit, every, ahead
        self._iterator: Iterator[Batch] | None = None
        self._waiting: deque[Batch] = deque()
        self._count = 0  # micro-batches read so far

    def next(self, iterator: Iterator[Batch], count: int, trained: int, has_generated: bool) -> list[Batch]:
        """Return the next `count` micro-batches of an epoch, after reading the following ones.

        `trained`: the micro-batches trained on so far; `has_generated`: whether completions are left to train on.
        """
        if iterator is not self._iterator:
            self._iterator, self._count = iterator, trained
            self._waiting.clear()
        while len(self._waiting) < count + self._ahead * self._every:
            batch = next(iterator, None)
            if batch is None:
                break
            if self._count % self._every == 0 or (self._count == trained and not has_generated):
                self._submit(batch)
            self._waiting.append(batch)
            self._count += 1
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
