"""Chats of any shape as messages with `role` and `content`: the one place that reads them, before every transform.

The keys of a dataset name the column, the keys of a message, the roles, and the place of the thinking. Messages with
`from` and `value` (ShareGPT) are recognised without them.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from ebft.config.shapes import ShapeKeys
from ebft.data.messages import Message, message_text, messages_of
from ebft.data.rendering import REPLY, ROW_KWARGS, TOOLS, row_kwargs
from ebft.data.tokens import join_thinking, split_thinking
from ebft.data.transforms.rows import first_present, text_of
from ebft.errors import DataError

# Other names of roles, unless the dataset uses them differently.
_ALIASES = {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool"}
_CALL = "function_call"  # the role of messages whose content is the JSON text of tool calls
_SHAREGPT = {"role": "from", "content": "value"}
_SYSTEM = "system"  # column of the system message, if the dataset names none
_FIX = "Set `field_messages` of the entry to its name."


def chat_of(example: dict[str, Any], entry: Any) -> list[Message]:
    """The messages of a row, from the column that the dataset's `entry` names, else `messages` or `conversations`.

    Empty if the chat is missing. A dotted name is a path into a column.
    """
    field = entry.field
    if field and "." in field and field not in example:
        where, found = f"column {field!r}", _value_at(example, field)
    else:
        columns = [field] if field else ["messages", "conversations"]
        column = first_present(example, columns, "messages", _FIX)
        where, found = f"column {column!r}", example[column]
    normal = normaliser(entry)
    if isinstance(found, list):
        found = [normal(message, number) for number, message in enumerate(found)]
    messages = messages_of(found, where)
    if entry.field_system is None and not entry.drop_system_message and _lacks_system(messages, example):
        return [{"role": "system", "content": text_of(example, _SYSTEM)}, *messages]
    return with_system(messages, example, entry)


def _lacks_system(messages: list[Message], example: dict[str, Any]) -> bool:
    """Whether a chat has no system message, but its row does."""
    if not messages or messages[0]["role"] == "system" or _SYSTEM not in example:
        return False
    return bool(text_of(example, _SYSTEM).strip())


def normaliser(entry: ShapeKeys) -> Callable[[Any, int], Any]:
    """Return a function that gives message number `i` of a chat the keys and roles of chat templates."""
    contents = {"content", _SHAREGPT["content"], (entry.message_property_mappings or {}).get("content")}
    aliases = role_names(entry)

    def normal(message: Any, number: int) -> Any:
        if not isinstance(message, Mapping):
            return message  # messages_of reports it
        # Arrow adds the keys of all messages to each, with the value None; an empty content is one.
        message = {key: value for key, value in message.items() if value is not None or key in contents}
        message = _renamed(message, number, entry.message_property_mappings or {})
        role = message.get("role")
        if role == _CALL and _CALL not in aliases:
            return _calling(message, number)
        if isinstance(role, str):
            message["role"] = aliases.get(role, role)
        if message.get("content") is not None:
            message["content"] = message_text(message, number)
        return _with_thinking(message, entry)

    return normal


def _calling(message: dict[str, Any], number: int) -> dict[str, Any]:
    """The assistant turn that a message with the text of tool calls (`{"name", "arguments"}`, or a list) stands for."""
    try:
        given = json.loads(message.get("content") or "")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"message {number} has the role {_CALL!r}, but its content is not the JSON text of a call ({error}). "
            f"Correct it, or name its role in `roles` of the dataset, for example `roles: {{assistant: [{_CALL}]}}`."
        ) from error
    calls = given if isinstance(given, list) else [given]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f"message {number} has the role {_CALL!r}, so its content must be JSON text with the keys name and "
            f"arguments, got {message.get('content')!r:.60}."
        )
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    rest = {key: value for key, value in message.items() if key != "content"}
    calls = [{"type": "function", "function": function} for function in functions]
    return {**rest, "role": "assistant", "tool_calls": calls}


def role_names(entry: ShapeKeys) -> dict[str, str]:
    """The role for the chat template of each name in the data that differs from it."""
    return _ALIASES | {name: role for role, names in (entry.roles or {}).items() for name in names}


def _renamed(message: dict[str, Any], number: int, given: dict[str, str]) -> dict[str, Any]:
    names = given
    if not given and "role" not in message and "from" in message:
        names = _SHAREGPT
    if "role" in names and names["role"] not in message:
        raise DataError(
            f"message {number} has no key {names['role']!r}, which has the role according to "
            f"message_property_mappings.role; it has {', '.join(message)}. Correct the mapping."
        )
    rest = {key: value for key, value in message.items() if key not in names.values() and key not in names}
    return rest | {key: message[name] for key, name in names.items() if name in message}


def _with_thinking(message: dict[str, Any], entry: ShapeKeys) -> dict[str, Any]:
    """The message with its thinking where the chat template expects it; `content` is a block at its start."""
    if entry.template_thinking_key == "content":
        thinking, content = message.pop(entry.field_thinking, None), message.get("content")
        if isinstance(thinking, str) and thinking.strip() and isinstance(content, str | None):
            message["content"] = join_thinking(thinking, content or "")
        return message
    if entry.field_thinking != entry.template_thinking_key and entry.field_thinking in message:
        message[entry.template_thinking_key] = message.pop(entry.field_thinking)
    content = message.get("content")
    if entry.split_thinking and message.get("role") == "assistant" and isinstance(content, str):
        thinking, answer = split_thinking(content)
        if thinking:
            message |= {"content": answer, entry.template_thinking_key: thinking}
    return message


def with_system(messages: list[Message], example: dict[str, Any], entry: Any) -> list[Message]:
    """The messages with the system message that the keys of the dataset ask for; an empty chat stays empty."""
    if entry.drop_system_message:
        messages = [message for message in messages if message["role"] != "system"]
    if not messages:
        return messages
    has_one = messages[0]["role"] == "system"
    if entry.field_system is not None:
        column = first_present(example, [entry.field_system], "the system message", "Correct `field_system`.")
        text = text_of(example, column)
        if text and has_one:
            raise DataError(
                f"the chat starts with a system message, and column {column!r} has another one. Set "
                "drop_system_message: true to leave out that of the chat, or remove field_system."
            )
        if text:
            return [{"role": "system", "content": text}, *messages]
    if entry.system_prompt is not None and not has_one:
        return [{"role": "system", "content": entry.system_prompt}, *messages]
    return messages


def tools_of(example: dict[str, Any], entry: Any) -> list[Any] | None:
    """The descriptions of tools of a row, None if it has none."""
    found = example.get(entry.field_tools)
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else None
        except ValueError as error:
            raise DataError(f"column {entry.field_tools!r} (field_tools) is not valid JSON ({error}).") from error
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise DataError(
            f"column {entry.field_tools!r} (field_tools) must contain a list of tool descriptions or JSON text of one, "
            f"got {found!r:.60}. Correct it, or set field_tools to another column."
        )
    return found


def template_columns(example: dict[str, Any], entry: Any) -> dict[str, Any]:
    """What the chat template reads besides the messages of a row, for transforms that return messages."""
    tools, kwargs = tools_of(example, entry), row_kwargs(example)
    return ({TOOLS: tools} if tools else {}) | ({ROW_KWARGS: kwargs} if kwargs else {})


def reply_column(reply: Message | None) -> dict[str, Message]:
    """The message of a reference that has more than text, such as thinking or tool calls."""
    return {REPLY: reply} if reply is not None and reply.keys() > {"role", "content"} else {}


def _value_at(example: dict[str, Any], path: str) -> Any:
    value: Any = example
    for key in path.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or key not in value:
            raise DataError(f"the row has no {path!r} ({key!r} is missing). Correct `field_messages` of the entry.")
        value = value[key]
    return value
