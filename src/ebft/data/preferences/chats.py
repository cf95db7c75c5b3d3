"""Completions in columns of messages: `chat_template.*`, and the message columns of `chatml.*` and `llama3.*`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ebft.data.messages import Message, messages_of
from ebft.errors import DataError

Normaliser = Callable[[Any, int], Any]


def column(example: Mapping[str, Any], name: str) -> Any:
    """The value of a column. Raises DataError if the row does not have it."""
    if name not in example:
        raise DataError(
            f"the column {name!r} is missing: the row has {', '.join(example)}. Choose another type, or name the "
            "columns with type: {field_prompt: ..., field_chosen: ..., field_rejected: ...}"
        )
    return example[name]


def chat(example: Mapping[str, Any], name: str, normal: Normaliser | None = None) -> list[Message]:
    """The messages of a column; `normal` gives them the keys and roles of chat templates (`ebft.data.chats`)."""
    value = column(example, name)
    if normal is not None and isinstance(value, list):
        value = [normal(message, number) for number, message in enumerate(value)]
    return messages_of(value, f"column {name!r}")


def reply(
    example: Mapping[str, Any], name: str, asked: list[Message], normal: Normaliser | None = None
) -> list[Message]:
    """The messages that a column adds to `asked`: a text, one message, or several, with or without `asked`.

    The last one must be an assistant turn.
    """
    value = column(example, name)
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}] if value.strip() else []
    messages = chat({name: [value]} if isinstance(value, Mapping) else example, name, normal)
    added = messages[len(asked) :] if messages[: len(asked)] == asked else messages
    split_reply(added, name)  # raises
    return added


def split_reply(messages: list[Message], name: str) -> tuple[list[Message], list[Message]]:
    """The prompt and the answer of a chat, which must end with an assistant turn unless it is empty."""
    if not messages:
        return [], []
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"column {name!r} ends with a message of the role {messages[-1]['role']!r}, but the last message is the "
            "answer that is compared, with the role assistant"
        )
    return messages[:-1], messages[-1:]


def question_and_answer(example: Mapping[str, Any], name: str) -> tuple[str, str]:
    """The texts of a chat of one question and its answer."""
    messages = chat(example, name)
    if not messages:
        return "", ""
    if len(messages) != 2:
        raise DataError(
            f"column {name!r} has {len(messages)} messages, but this format reads one question and one answer. Use "
            "chat_template.argilla_chat, which renders all messages with the chat template"
        )
    return content(messages[0], name), content(messages[1], name)


def content(message: Message, name: str) -> str:
    """The text of a message."""
    text = message.get("content")
    if not isinstance(text, str):
        raise DataError(f"a message in column {name!r} must contain text, got {type(text).__name__}")
    return text
