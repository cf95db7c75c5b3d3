"""Chats as lists of messages: their checks, their contents as texts, and finding the turns that are answers."""

from collections.abc import Iterable, Mapping
from typing import Any

from ebft.errors import DataError

Message = dict[str, Any]

_SHAPE = "If they have other keys, name them in message_property_mappings of the entry."
_TEXTS = ("text", "input_text", "output_text", None)  # types of parts of contents that are texts
_MEDIA = ("image", "image_url", "audio", "input_audio", "audio_url", "video", "video_url", "file")
_RESULTS = ("tool", "function", "ipython")  # roles whose content may be a JSON object


def messages_of(messages: Any, where: str) -> list[Message]:
    """The messages in a value, empty for None. Raises DataError, which starts with `where`, for anything else."""
    if messages is None:
        return []
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise DataError(f"{where} must contain a list of messages with the keys role and content. {_SHAPE}")
    return as_texts(messages)


def as_texts(messages: Iterable[Message]) -> list[Message]:
    """The messages with texts as contents, and without the keys that Arrow adds to messages, with the value None.

    Every chat is read here before it is compared or rendered: a chat template that expects texts prints a list of
    parts, or a missing content, as Python does. Raises DataError for contents that are not text.
    """
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise DataError(f"message {number} has no role. Set it, for example to user.")
        # Templates check for the presence of keys.
        rest = {key: value for key, value in message.items() if value is not None}
        if "content" in rest or not rest.get("tool_calls"):
            rest["content"] = message_text(rest, number)
        found.append(rest)
    return found


def message_text(message: Mapping[str, Any], number: int) -> Any:
    """The content of message `number` as text: its parts are joined, and a missing one is empty.

    A result of a tool may be a JSON object, which is returned as it is. Raises DataError for anything else.
    """
    content, role = message.get("content"), message.get("role")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping) and role in _RESULTS:
        return content
    what = f"the content of message {number} ({role})"
    if not isinstance(content, list):
        raise DataError(
            f"{what} must be text or a list of parts with text, got {type(content).__name__} ({content!r:.60}). Write "
            "it as text."
        )
    return "".join(_part_text(part, what) for part in content)


def _part_text(part: Any, what: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in _TEXTS and not any(part.get(key) for key in _MEDIA):
        if isinstance(part.get("text"), str):
            return part["text"]
        raise DataError(
            f"{what} has a part whose text is missing or is not text ({part!r:.60}). Correct the part, or remove it."
        )
    kind = next((key for key in _MEDIA if part.get(key)), None) if kind in _TEXTS else kind
    raise DataError(
        f"{what} has a part of type {kind!r}, but models are trained on text only. Remove such parts, or the row."
    )


def _is_message(message: Any) -> bool:
    """Whether a value is a message: a turn that only calls tools may lack its content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
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
    """The text of an assistant turn, empty if missing."""
    return message.get("content", "")
