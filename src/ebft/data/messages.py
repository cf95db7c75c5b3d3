"""Chats as lists of messages: reading the column, and telling which turns answer something."""

from typing import Any

from ebft.data.transforms.rows import first_present
from ebft.errors import DataError

Message = dict[str, Any]

_SHAPE = "Chats of from and value (ShareGPT's conversations) must be turned into messages of role and content first."


def chat_of(example: dict[str, Any], field: str | None) -> list[Message]:
    """The messages of a row, in the column `field` or else `messages`; empty for a missing chat."""
    columns = [field] if field else ["messages"]
    column = first_present(example, columns, "messages", f"Name it with the entry's `field`. {_SHAPE}")
    return messages_of(example[column], f"column {column!r}")


def messages_of(messages: Any, where: str) -> list[Message]:
    """The messages in a value, empty for None; DataError says `where` something else was found."""
    if messages is None:
        return []
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message and "content" in message for message in messages
    ):
        raise DataError(f"{where} must hold a list of messages with the keys role and content. {_SHAPE}")
    # Arrow gives every message the keys of all messages, None where it has none; templates test for presence.
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def replies(messages: list[Message]) -> list[int]:
    """Positions of the assistant's turns, without a greeting that opens the chat."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]


def answers(messages: list[Message]) -> list[int]:
    """Positions of the assistant's turns that a user's (or a tool's) turn precedes."""
    asked = (index for index, message in enumerate(messages) if message["role"] not in ("system", "assistant"))
    first = next(asked, len(messages))
    return [index for index in replies(messages) if index > first]


def before_last_answer(messages: list[Message]) -> tuple[list[Message], Message | None]:
    """The messages before the last answer, and that answer; all messages and None where nothing is answered."""
    found = answers(messages)
    return (messages[: found[-1]], messages[found[-1]]) if found else (messages, None)


def content_text(message: Message) -> str:
    """The text of an assistant's turn, empty for a missing one; DataError when it holds something else."""
    content = message.get("content", "")
    if not isinstance(content, str):
        raise DataError(
            f"the content of an assistant turn must be text, it is {type(content).__name__}. Join its "
            "parts to one text."
        )
    return content
