"""Rolling conversations out: one reply after the other, each sampled given everything before it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ebft.data.conversation import Conversation, Message, Turn, end_length
from ebft.errors import DataError
from ebft.structured.rollouts.sampling import Backend


@dataclass
class Rollout:
    """One sampled conversation after its prompt.

    `ids` are all tokens after the prompt; `generated` marks (1) those that the policy sampled and (0) those that were
    given, such as user turns; `logps` are the sampling log-probabilities, 0 at given tokens, None where unknown.
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    logps: list[float] | None = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)

    def give(self, ids: list[int]) -> None:
        """Append tokens that nobody sampled."""
        self.ids += ids
        self.generated += [0] * len(ids)
        if self.logps is not None:
            self.logps += [0.0] * len(ids)

    def reply(self, ids: list[int], logps: list[float] | None) -> None:
        """Append a sampled reply."""
        self.ids += ids
        self.generated += [1] * len(ids)
        self.logps = self.logps + logps if self.logps is not None and logps is not None else None
        self.replies.append(ids)


class ReferenceLimit(NamedTuple):
    """Most tokens of a reply, by the length of its own reference: `multiplier` lengths, at least `floor` tokens."""

    multiplier: float
    floor: int

    def of(self, reference_ids: list[int]) -> int:
        return max(self.floor, math.ceil(self.multiplier * len(reference_ids)))


@dataclass(frozen=True)
class Limits:
    """How long a reply may be, and how long all of a conversation may be."""

    max_completion_length: int
    by_reference: ReferenceLimit | None  # None: the reference's length does not matter
    max_length: int | None  # positions of model and server; None: no limit

    def reply(self, turn: Turn) -> int:
        """Most tokens of a reply to `turn`: by its own reference, where that counts."""
        if self.by_reference is None or not turn.reference_ids:
            return self.max_completion_length
        return min(self.max_completion_length, self.by_reference.of(turn.reference_ids))

    def room(self, length: int) -> int:
        """Tokens that still fit after `length` tokens."""
        return self.max_completion_length if self.max_length is None else self.max_length - length


def roll_out(
    backend: Backend, conversations: list[Conversation], limits: Limits, end_ids: Collection[int]
) -> list[Rollout]:
    """Sample every reply of every conversation, in order of turns; all conversations go on side by side.

    A reply that ended itself, with one of `end_ids`, is not ended again. A conversation without room for its next reply
    ends early. DataError where not even the first has room.
    """
    rollouts = [Rollout(list(conversation.prompt_ids)) for conversation in conversations]
    for number in range(max(len(conversation.turns) for conversation in conversations)):
        speaking, contexts, max_tokens = [], [], []
        for rollout, conversation in zip(rollouts, conversations):
            if number >= len(conversation.turns) or len(rollout.replies) < number:
                continue
            turn = conversation.turns[number]
            lead = [] if number == 0 else _after_end(turn.lead_ids, rollout.ids[-1], end_ids)
            room = limits.room(len(rollout.prompt_ids) + len(rollout.ids) + len(lead))
            if room < 1:
                if number == 0:
                    raise DataError(
                        f"a prompt of {len(rollout.prompt_ids)} tokens leaves no room for a completion within the "
                        f"{limits.max_length} tokens that model and server take. Leave such rows out, or raise "
                        "vllm.max_model_len."
                    )
                continue
            rollout.give(lead)
            speaking.append(rollout)
            contexts.append(rollout.prompt_ids + rollout.ids)
            max_tokens.append(min(limits.reply(turn), room))
        if not speaking:
            break
        completions = backend.generate(contexts, max_tokens)
        for rollout, completion in zip(speaking, completions, strict=True):
            rollout.reply(completion.ids, completion.logps)
    return rollouts


def _after_end(lead_ids: list[int], last_id: int, end_ids: Collection[int]) -> list[int]:
    """What leads to the next reply begins by ending this one, which a finished reply has done itself."""
    return lead_ids[end_length(lead_ids, end_ids) :] if last_id in end_ids else lead_ids


def reply_messages(
    tokenizer: Any, rollout: Rollout, remaining_turns: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """A rolled-out conversation as messages: the replies as sampled, the turns between them as given."""
    replies = iter(tokenizer.batch_decode(rollout.replies, skip_special_tokens=True))
    messages = [{"role": "assistant", "content": next(replies)}]
    given: list[Message] = []
    for message in remaining_turns or []:
        if message.get("role") != "assistant":
            given.append({key: value for key, value in message.items() if value is not None})
            continue
        reply = next(replies, None)
        if reply is None:
            break
        messages += [*given, {"role": "assistant", "content": reply}]
        given = []
    return messages
