"""Chats as lists of messages: their checks, and finding the turns that are answers."""

from typing import Any

from ebft.errors import DataError

Message = dict[str, Any]

_SHAPE = "If they have other keys, name them in message_property_mappings of the entry."


def messages_of(messages: Any, where: str) -> list[Message]:
    """The messages in a value, empty for None. Raises DataError, which starts with `where`, for anything else."""
    if messages is None:
        return []
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise DataError(f"{where} must contain a list of messages with the keys role and content. {_SHAPE}")
    # Arrow adds the keys of all messages to each message, with the value None; templates check for presence.
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _is_message(message: Any) -> bool:
    """Whether a value is a message: a turn that only calls tools may lack its content."""
    if not isinstance(message, dict) or "role" not in message:
        return False
    return "content" in message or bool(message.get("tool_calls"))


def replies(messages: list[Message]) -> list[int]:
    """Indices of the assistant turns, except a greeting at the start of the chat, and those with `weight: 0`."""
    return [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and index > 0 and not is_context(message)
    ]


def is_context(message: Message) -> bool:
    """Whether a message has `weight: 0`: it is read, but not trained on. Raises DataError for weights but 0 and 1."""
    weight = message.get("weight")
    if weight is None:
        return False
    if isinstance(weight, str | list | dict) or weight not in (0, 1):
        raise DataError(
            f"the weight of a message ({message['role']}) must be 0 (context, not trained on) or 1, got "
            f"{weight!r:.60}. To repeat the rows of a dataset, set its `weight`."
        )
    return weight == 0


def answers(messages: list[Message]) -> list[int]:
    """Indices of the assistant turns that follow a user (or tool) turn."""
    asked = (index for index, message in enumerate(messages) if message["role"] not in ("system", "assistant"))
    first = next(asked, len(messages))
    return [index for index in replies(messages) if index > first]


def before_last_answer(messages: list[Message]) -> tuple[list[Message], Message | None]:
    """The messages before the last answer, and that answer; all messages and None if there is no answer."""
    found = answers(messages)
    return (messages[: found[-1]], messages[found[-1]]) if found else (messages, None)


def content_text(message: Message) -> str:
    """The text of an assistant turn, empty if missing. Raises DataError if it is not text."""
    content = message.get("content", "")
    if not isinstance(content, str):
        raise DataError(
            f"the content of an assistant turn must be text, got {type(content).__name__}. Join its "
            "parts into one text."
        )
    return content
