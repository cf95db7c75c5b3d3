"""A rolled-out conversation as messages, for reward functions and downstream metrics."""

from typing import Any

from ebft.data.conversation import Message
from ebft.structured.rollouts.turns import Rollout


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
