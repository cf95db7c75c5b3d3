"""Multi-turn rollouts: the replies of a conversation are sampled in order, each given all previous turns."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ebft.data.conversation import Conversation, is_reply
from ebft.data.messages import Message
from ebft.errors import DataError
from ebft.prefix.sampling import Truncation


@dataclass
class Rollout:
    """A sampled conversation after its prompt.

    `ids` are all tokens after the prompt. `generated` is 1 for tokens sampled from the policy and 0 for given tokens,
    such as user turns. `logps` are the sampling log-probabilities, 0 at given tokens, or None if unknown.
    `reward` is the reward that an agent's environment gave for the conversation, or None.
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    logps: list[float] | None = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    reward: float | None = None

    def give(self, ids: list[int]) -> None:
        """Append given tokens, which are not sampled."""
        self.ids += ids
        self.generated += [0] * len(ids)
        if self.logps is not None:
            self.logps += [0.0] * len(ids)

    def reply(self, ids: list[int], logps: list[float] | None) -> None:
        self.ids += ids
        self.generated += [1] * len(ids)
        self.logps = self.logps + logps if self.logps is not None and logps is not None else None
        self.replies.append(ids)


class ReferenceLimit(NamedTuple):
    """Maximum length of replies: `multiplier` times the length of the longest reference, but at least `floor` tokens.

    A limit that depended on a reply's own reference would cut samples where references do not go on, so that the model
    learns to end early.
    """

    multiplier: float
    floor: int

    def of(self, longest: int | None, most: int) -> int:
        """Return the limit, at most `most`, which it is if the `longest` reference is not known."""
        return most if longest is None else min(most, max(self.floor, math.ceil(self.multiplier * longest)))


@dataclass(frozen=True)
class Limits:
    """Maximum lengths of a reply and of a conversation, in tokens."""

    max_completion_length: int
    max_length: int | None  # maximum sequence length of model and server; None: no limit

    def room(self, length: int) -> int:
        """Return the number of tokens that can follow `length` tokens."""
        return self.max_completion_length if self.max_length is None else self.max_length - length

    def check(self, prompts: list[list[int]]) -> None:
        """Raise DataError if a prompt leaves no space for a completion."""
        longest = max(map(len, prompts))
        if self.room(longest) < 1:
            raise DataError(
                f"a prompt of {longest} tokens leaves no space for a completion within the maximum sequence length of "
                f"{self.max_length} tokens. Remove such rows, or increase vllm.max_model_len."
            )


def roll_out(
    backend: Backend, conversations: list[Conversation], limits: Limits, end_ids: Collection[int]
) -> list[Rollout]:
    """Sample all replies of all conversations, turn by turn, with all conversations in parallel.

    No end token is added to a reply that ends with one of `end_ids`. A conversation stops early if its next reply would
    exceed the maximum length. Raises DataError if a prompt leaves no space for a first reply.
    """
    rollouts = [Rollout(list(conversation.prompt_ids)) for conversation in conversations]
    limits.check([rollout.prompt_ids for rollout in rollouts])
    for number in range(max(len(conversation.turns) for conversation in conversations)):
        speaking, contexts, max_tokens = [], [], []
        for rollout, conversation in zip(rollouts, conversations):
            if number >= len(conversation.turns) or len(rollout.replies) < number:
                continue
            turn = conversation.turns[number]
            lead = turn.lead_ids if number else []
            if number and rollout.ids[-1] in end_ids:  # the reply before it has already ended
                lead = turn.lead_ids[turn.ended :]
            room = limits.room(len(rollout.prompt_ids) + len(rollout.ids) + len(lead))
            if room < 1:
                continue
            rollout.give(lead)
            speaking.append(rollout)
            contexts.append(rollout.prompt_ids + rollout.ids)
            max_tokens.append(min(limits.max_completion_length, room))
        if not speaking:
            break
        completions = backend.generate(contexts, max_tokens)
        for rollout, completion in zip(speaking, completions, strict=True):
            rollout.reply(completion.ids, completion.logps)
    return rollouts


def reply_messages(
    tokenizer: Any, rollout: Rollout, remaining_turns: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return a rollout as messages: the sampled replies and the given turns between them."""
    replies = iter(tokenizer.batch_decode(rollout.replies, skip_special_tokens=True))
    messages = [{"role": "assistant", "content": next(replies)}]
    given: list[Message] = []
    for message in remaining_turns or []:
        if not is_reply(message):
            given.append({key: value for key, value in message.items() if value is not None})
            continue
        reply = next(replies, None)
        if reply is None:
            break
        messages += [*given, {"role": "assistant", "content": reply}]
        given = []
    return messages


# Other parameters of a backend that do not change the distribution of a token.
_HARMLESS = {"stop", "include_stop_str_in_output", "priority", "use_cache", "cache_implementation", "cache_config"}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `end_ids` are tokens that end a completion; `extra` is passed to the backend unchanged.

    `unknown`: the last ids of the vocabulary if they are not sampled.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    end_ids: frozenset[int] = frozenset()
    regex: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    unknown: range = range(0)

    def unscored(self, truncated: bool) -> list[str]:
        """Return the parameters with which tokens are sampled from another distribution than the trainer scores.

        `truncated`: whether it applies top-k, top-p and min-p.
        """
        found = [] if truncated or Truncation.of(self.top_k, self.top_p, self.min_p) is None else ["top_k/top_p/min_p"]
        found += ["repetition_penalty"] if self.repetition_penalty != 1 else []
        found += ["vllm_structured_outputs_regex"] if self.regex is not None else []
        return found + sorted(self.extra.keys() - _HARMLESS)


@dataclass(frozen=True)
class Completion:
    """Sampled ids, including the terminating token, and their log-probabilities if the backend provides them."""

    ids: list[int]
    logps: list[float] | None


class Backend(Protocol):
    """Samples completions of token ids."""

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Completion]:
        """Return one completion per prompt, of 1 to `max_tokens[i]` tokens, each sampled independently."""
        ...
