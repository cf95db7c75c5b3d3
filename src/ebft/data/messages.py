"""Chats as lists of messages: their checks and contents, and the chats of rows of any shape, before every transform.

The keys of a dataset name the column, the keys of a message, the roles, and the place of the thinking. Messages with
`from` and `value` (ShareGPT) are recognised without them.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ebft.config.section import ShapeKeys
from ebft.data import row_counts
from ebft.data.tokens import THINKING, join_thinking, split_thinking
from ebft.errors import DataError, doing

Message = dict[str, Any]

# Columns of a row: arguments of the template, as in TRL; descriptions of tools; the message of the reference.
ROW_KWARGS, TOOLS, REPLY = "chat_template_kwargs", "tools", "reply"
# Columns with the second part of a chat whose first part is in `prompt`, as rows of TRL's trainers have it.
ANSWERS = ("completion", "ground_truth")
# Other names of roles, unless the dataset uses them differently.
_MODELS = ("gpt", "model", "chatgpt", "bing", "bard")
_ALIASES = {"human": "user", "observation": "tool", **dict.fromkeys(_MODELS, "assistant")}
# The role of messages whose content is the JSON text of tool calls, and the key of a message with one call, which was
# OpenAI's format before `tool_calls`.
_CALL = "function_call"
_SHAREGPT = {"role": "from", "content": "value"}
_FIX = "Set `field_messages` of the entry to its name."
_SHAPE = "If they have other keys, name them in message_property_mappings of the entry."
_MEDIA = ("image", "image_url", "audio", "input_audio", "audio_url", "video", "video_url", "file")
_INSTRUCTS = ("system", "developer")
_RESULTS = ("tool", "function", "ipython")  # roles whose content may be a JSON object


def messages_of(messages: Any, where: str) -> list[Message]:
    """The messages in a value, empty for None. Raises DataError, which starts with `where`, for anything else."""
    if messages is None:
        return []
    is_message = lambda message: (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and ("content" in message or bool(message.get("tool_calls") or message.get(_CALL)))
    )
    if not isinstance(messages, list) or not all(map(is_message, messages)):
        raise DataError(f"{where} must contain a list of messages with the keys role and content. {_SHAPE}")
    return as_texts(messages)


def text_or_messages(value: Any, where: str) -> str | list[Message]:
    """A text, empty for None, or the messages in another value as in `messages_of`."""
    return value or "" if value is None or isinstance(value, str) else messages_of(value, where)


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
        rest = _with_calls({key: value for key, value in message.items() if value is not None}, number)
        if "content" in rest or not rest.get("tool_calls"):
            rest = _as_text(rest, number)
        found.append(rest)
    return found


def _with_calls(message: Message, number: int) -> Message:
    """The message with its calls as a list in `tool_calls`, whose arguments are objects or the JSON text of one."""
    found = message.get("tool_calls") or message.get(_CALL)
    if not found:
        return message
    what = f"the tool calls of message {number} ({message['role']})"
    found = _unpacked(found, what)
    if not message.get("tool_calls"):
        found = {"type": "function", "function": found}
    calls = [_call(call, what) for call in (found if isinstance(found, list) else [found])]
    return {key: value for key, value in message.items() if key != _CALL} | {"tool_calls": calls}


def _call(call: Any, what: str, is_inner: bool = False) -> Any:
    """A call as chat templates read it: its name and arguments are below `function`, which data may leave out."""
    call = _unpacked(call, what)
    if call.get("function") is not None:
        return {**call, "function": _call(call["function"], what, is_inner=True)}
    if "arguments" in call:
        given = call["arguments"]
        found = inner = {} if given is None or (isinstance(given, str) and not given.strip()) else given
        while isinstance(inner, str):  # without a second encoding as JSON
            found, inner = inner, _unpacked(inner, f"the arguments in {what}")
        if not isinstance(inner, Mapping):
            raise DataError(f"the arguments in {what} must be a JSON object or its JSON text, got {given!r:.60}.")
        call = {**call, "arguments": found}
    if is_inner or not isinstance(call.get("name"), str):
        return call
    inner = {key: call[key] for key in ("name", "arguments") if key in call}
    return {"type": "function", **{key: call[key] for key in call if key not in inner}, "function": inner}


def _unpacked(value: Any, what: str) -> Any:
    """The value of a JSON text; another value as it is."""
    with doing(f"reading {what} as JSON"):
        return json.loads(value) if isinstance(value, str) else value


def _as_text(message: Message, number: int) -> Message:
    """The message with its content as text, and with the thinking of a first part (Anthropic, Mistral) in a key."""
    content, is_reply = message.get("content"), message.get("role") == "assistant"
    first = content[0] if is_reply and isinstance(content, list) and content else None
    is_thinking = isinstance(first, Mapping) and first.get("type") == "thinking" and first.get("thinking") is not None
    if is_thinking and not any(map(message.get, THINKING)):
        thinking = message_text({**message, "content": first["thinking"]}, number)
        message = {**message, THINKING[0]: thinking, "content": content[1:]}
    return {**message, "content": message_text(message, number)}


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
            f"{what} must be text or a list of parts with text, got {type(content).__name__} ({content!r:.60})."
        )
    return "".join(_part_text(part, what) for part in content)


def _part_text(part: Any, what: str) -> str:
    if isinstance(part, str):
        return part
    is_text = isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text", None)
    if is_text and isinstance(part.get("text"), str) and not any(part.get(key) for key in _MEDIA):
        return part["text"]
    raise DataError(
        f"{what} has a part that is not text ({part!r:.60}), but models are trained on text only. Remove it or the row."
    )


def replies(messages: list[Message]) -> list[int]:
    """Indices of the assistant turns, except a greeting at the start of the chat, and those with `weight: 0`.

    A system message may stand before a greeting. Without any user turn, what follows it is the answer.
    """
    roles = [message["role"] for message in messages]
    start = next((index for index, role in enumerate(roles) if role not in ("system", "developer")), 0)
    greets = start == 0 or any(role not in ("system", "developer", "assistant") for role in roles)
    return [
        index
        for index, message in enumerate(messages)
        if roles[index] == "assistant" and not (greets and index == start) and not is_context(message)
    ]


# Keys of a message that say whether it is trained on, and the value with which it is context.
MARKS = {"weight": 0, "loss_mask": 0, "loss": 0, "loss_weight": 0, "train": 0, "masked": 1}


def is_context(message: Message) -> bool:
    """Whether a key of `MARKS` says that a message is read, but not trained on.

    Raises DataError for values but 0, 1, true and false.
    """
    given = {key: message[key] for key in MARKS if message.get(key) is not None}
    for key, value in given.items():
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise DataError(
                f"the {key} of a message ({message['role']}) must be 0 (context, not trained on) or 1, got "
                f"{value!r:.60}. To repeat the rows of a dataset, set its `weight`."
            )
    return any(value == MARKS[key] for key, value in given.items())


def check_turns(messages: list[Message]) -> None:
    """Raise Dropped for a chat without a question, with an empty turn, or with two turns of one role in a row.

    Up to its last reply, if it has one. Tools can give several results, which can be empty, and a call can be a turn of
    its own after a text.
    """
    said = [says_something(message) for message in messages]
    replied = [
        message["role"] == "assistant" and (says or bool(message.get("tool_calls")) or any(map(message.get, THINKING)))
        for message, says in zip(messages, said)
    ]
    stop = max((number + 1 for number, is_reply in enumerate(replied) if is_reply), default=len(messages))
    roles = [message["role"] for message in messages[:stop]]
    asks = [n for n, role in enumerate(roles) if role not in _INSTRUCTS and role != "assistant" and said[n]]
    is_greeting = lambda n: all(role in _INSTRUCTS for role in roles[:n])
    goes_on = lambda n: roles[n] == roles[n - 1] and roles[n] not in _RESULTS and not messages[n].get("tool_calls")
    reason = None
    if not asks or any(replied[n] and not is_greeting(n) for n in range(asks[0])):
        reason = row_counts.NO_PROMPT
    elif any(role in ("user", "assistant") and not (said[n] or replied[n]) for n, role in enumerate(roles)):
        reason = row_counts.EMPTY_TURN
    elif any(map(goes_on, range(1, len(roles)))):
        reason = row_counts.SAME_ROLE
    if reason:
        raise row_counts.Dropped(reason)


def answers(messages: list[Message]) -> list[int]:
    """Indices of the assistant turns that follow a user (or tool) turn."""
    asked = (index for index, message in enumerate(messages) if message["role"] not in ("system", "assistant"))
    first = next(asked, len(messages))
    return [index for index in replies(messages) if index > first]


def before_last_answer(messages: list[Message]) -> tuple[list[Message], Message | None]:
    """The messages before the last answer, and that answer; all messages and None if there is no answer."""
    found = answers(messages)
    return (messages[: found[-1]], messages[found[-1]]) if found else (messages, None)


def each_answer(messages: list[Message]) -> list[int]:
    """The answers, if each is a row: only the first one if nothing is said before it, so that the chat is dropped."""
    found = answers(messages)
    return found if found and any(map(says_something, messages[: found[0]])) else found[:1]


def says_something(message: Message) -> bool:
    """Whether a message has a content but white space; one that only calls tools has none."""
    return bool(str(message.get("content") or "").strip())


def chat_of(example: dict[str, Any], entry: Any) -> list[Message]:
    """The messages of a row, from the column of `entry`, else `messages` or `conversations`, else `prompt` and answer.

    Assistant turns of the prompt are context. Empty if the chat is missing. A dotted name is a path into a column.
    """
    columns = [entry.field] if entry.field else ["messages", "conversations"]
    pairs = [] if entry.field else [("prompt", name) for name in ANSWERS]
    found = row_counts.first_shape(example, [*((name,) for name in columns), *pairs])
    if found in pairs:
        answer = found[1]
        prompt, text = _messages_in(example, "prompt", entry), example[answer]
        role = (entry.message_property_mappings or {}).get("role", "role")
        is_text = isinstance(text, str) and not isinstance(chat_in_json(text, role), list)
        completion = [{"role": "assistant", "content": text}] if is_text else _messages_in(example, answer, entry)
        asked = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt]
        messages = [*asked, *completion]
    else:
        messages = _messages_in(example, row_counts.first_present(example, columns, "messages", _FIX), entry)
    return with_system(messages, example, entry)


def chat_in_json(value: Any, role: str = "role") -> Any:
    """The message or messages in a JSON text, which have roles; another value, such as an answer in JSON, as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    each = found if isinstance(found, list) else [found]
    is_chat = each and all(
        isinstance(one, Mapping) and not one.keys().isdisjoint({"role", "from", role}) for one in each
    )
    return found if is_chat else value


def _messages_in(example: dict[str, Any], column: str, entry: Any) -> list[Message]:
    return read_chat(row_counts.value_of(example, column), f"column {column!r}", normaliser(entry))


def read_chat(value: Any, where: str, normal: Callable[[Any, int], Any]) -> list[Message]:
    """The messages in a list or in its JSON text, as tables have it, which `normal` converts; empty for None."""
    if isinstance(value, str):
        with doing(f"reading {where} as the JSON of messages (rows of texts have other types, such as alpaca)"):
            value = json.loads(value) if value.strip() else None
    value = [normal(message, number) for number, message in enumerate(value)] if isinstance(value, list) else value
    return messages_of(value, where)


def normaliser(entry: ShapeKeys) -> Callable[[Any, int], Any]:
    """Return a function that gives message number `i` of a chat the keys and roles of chat templates."""
    mapped = (entry.message_property_mappings or {}).get("content", "")
    contents = {"content", _SHAREGPT["content"], mapped, mapped.partition(".")[0]}
    aliases = role_names(entry)

    def normal(message: Any, number: int) -> Any:
        if not isinstance(message, Mapping):
            return message  # messages_of reports it
        # Arrow adds the keys of all messages to each, with the value None; an empty content is one.
        message = {key: value for key, value in message.items() if value is not None or key in contents}
        names = entry.message_property_mappings or {}
        if not names and "role" not in message and "from" in message:
            names = _SHAREGPT
        present = {key: name for key, name in names.items() if row_counts.has_column(message, name)}
        given = {key: row_counts.value_of(message, name) for key, name in present.items()}
        message = {key: message[key] for key in message if key not in names.values() and key not in names} | given
        role = message.get("role")
        if role == _CALL and _CALL not in aliases:
            given = _unpacked(message.pop("content", None), f"the content of message {number} ({_CALL})")
            calls = given if isinstance(given, list) else [given]
            functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
            calls = [{"type": "function", "function": function} for function in functions]
            return message | {"role": "assistant", "tool_calls": calls}
        if isinstance(role, str):
            message["role"] = aliases.get(role, role)
        if message.get("content") is not None:
            message = _as_text(message, number)
        return _with_thinking(message, entry)

    return normal


def role_names(entry: ShapeKeys) -> dict[str, str]:
    """The role for the chat template of each name in the data that differs from it."""
    return _ALIASES | {name: role for role, names in (entry.roles or {}).items() for name in names}


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
    """The messages with the system message of the row or of the keys of the dataset; an empty chat stays empty."""
    given = "system" if entry.field_system is None else entry.field_system
    if entry.field_system is not None:
        row_counts.first_present(example, [given], "the system message", "Correct `field_system`.")
    text = row_counts.optional_text(example, given)
    if entry.drop_system_message:
        messages = [message for message in messages if message["role"] != "system"]
        text = "" if entry.field_system is None else text
    has_one = bool(messages) and messages[0]["role"] == "system"
    if entry.field_system is not None and text and has_one:
        raise DataError(
            f"the chat starts with a system message, and column {given!r} has another one. Set drop_system_message: "
            "true to leave out the one in the chat, or remove field_system."
        )
    text = text if text.strip() else entry.system_prompt
    return [{"role": "system", "content": text}, *messages] if messages and text and not has_one else messages


def tools_of(example: dict[str, Any], entry: Any) -> list[Any] | None:
    """The descriptions of tools of a row, None if it has none."""
    found = _json_column(example, entry.field_tools, f"column {entry.field_tools!r} (field_tools)")
    return [_described(tool) for tool in found] if found else None


def _described(tool: Any) -> Any:
    """The description of a tool, whose parameters may be JSON text."""
    found = dict(tool.items())
    if isinstance(found.get("function"), Mapping):
        found["function"] = _described(found["function"])
    if "parameters" in found:
        found["parameters"] = _unpacked(found["parameters"], "the parameters of a tool")
    return found


def row_kwargs(example: Mapping[str, Any], *others: Mapping[str, Any] | None) -> dict[str, Any]:
    """The template's arguments for a row: from its column, a dict or JSON text, then `others`, the first wins.

    Arrow gives a row the arguments of all rows, with the value None, which are left out.
    """
    found = _json_column(example, ROW_KWARGS, f"column {ROW_KWARGS!r}")
    merged = {key: value for key, value in (found or {}).items() if value is not None}
    for other in others:
        merged = {**(other or {}), **merged}
    return merged


def _json_column(example: Mapping[str, Any], column: str, where: str) -> Any:
    """The value of a column, or of the JSON text in it; None if it is missing or an empty text."""
    found = row_counts.value_of(example, column) if row_counts.has_column(example, column) else None
    return None if isinstance(found, str) and not found.strip() else _unpacked(found, where)


def template_columns(example: dict[str, Any], entry: Any) -> dict[str, Any]:
    """What the chat template reads besides the messages of a row, for transforms that return messages."""
    tools, kwargs = tools_of(example, entry), row_kwargs(example)
    return ({TOOLS: tools} if tools else {}) | ({ROW_KWARGS: kwargs} if kwargs else {})
