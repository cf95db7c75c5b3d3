"""Formats of preference data: rows with `prompt`, and `chosen` and `rejected`, or `completion` and `label`.

- `chatml.*` and `llama3.*`: texts, with the marks of these formats around them;
- `chat_template.*`: messages, which the chat template renders;
- `passthrough`: the columns as they are;
- a mapping of columns (`type: {field_prompt: ...}`): texts, without marks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ebft.data.messages import Message, from_json, messages_of, normaliser, template_columns, with_system
from ebft.data.transforms import PreferenceColumns
from ebft.data.transforms.rows import first_shape, has_column, optional_text, text_of, value_of
from ebft.errors import DataError

Row = Mapping[str, Any]
Normaliser = Callable[[Any, int], Any]  # gives a message the keys and roles of chat templates

COMPLETIONS = {"preferences": ("chosen", "rejected"), "labelled": ("completion",)}
# The columns of the prompt in formats of texts, the first that is there. Those that are not here have messages.
_PROMPT = {
    "default": ("prompt", "input", "question", "instruction"),
    "intel": ("question",),
    "icr": ("input",),
    "prompt_pairs": ("prompt",),
    "ultra": ("prompt",),
    "argilla": ("instruction",),
}


@dataclass(frozen=True)
class Style:
    """The parts of a chat with one question; `{}` is replaced with the text."""

    system: str
    user: str  # up to the start of the answer
    end: str

    def prompt(self, user: str, system: str) -> str:
        """The text before the answer; empty if there is no question."""
        if not user.strip():
            return ""
        return (self.system.format(system) if system.strip() else "") + self.user.format(user)

    def completion(self, text: str) -> str:
        """An answer with its end; empty if it says nothing."""
        return text + self.end if text.strip() else ""


STYLES = {
    "chatml": Style(
        "<|im_start|>system\n{}<|im_end|>\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "llama3": Style(
        "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
}


def format_transform(name: str | PreferenceColumns) -> Callable:
    """The transform of a format, or of a mapping of columns: a function of the config and the dataset entry."""

    def transform(cfg: Any, dataset: Any, **kwargs: Any) -> tuple[Callable, dict[str, Any]]:
        read, label = _reader(name, dataset, COMPLETIONS[cfg.required_rows.kind]), "label"
        if isinstance(name, PreferenceColumns):
            label = name.field_label or label
        if cfg.required_rows.kind != "labelled":
            transform_fn = lambda example, tokenizer=None: read(example)
        else:
            transform_fn = lambda example, tokenizer=None: {**read(example), "label": _column(example, label)}
        return transform_fn, {"remove_columns": "__all__"}

    return transform


def _reader(name: str | PreferenceColumns, entry: Any, completions: tuple[str, ...]) -> Callable[[Row], dict[str, Any]]:
    """The function that reads the prompt and the completions of a row."""
    if isinstance(name, PreferenceColumns):
        return partial(_columns, name, completions)
    if name == "passthrough":
        columns = ("prompt", *completions)
        return lambda example: {key: _column(example, key) for key in columns} | template_columns(example, entry)
    module, _, function = name.rpartition(".")
    if module == "chat_template":
        return partial(_chats, function, entry)
    return partial(_texts, STYLES[module], function, completions)


def _texts(style: Style, function: str, names: tuple[str, ...], example: Row) -> dict[str, str]:
    """`chatml.*` and `llama3.*`."""
    if function == "argilla_chat":
        prompts, completions = zip(*(_question_and_answer(example, name) for name in names))
        prompt = _same(*prompts)
    else:
        prompt = _first_text(example, *_PROMPT[function])
        if function == "ultra" and names != ("completion",):
            completions = [_last_content(example, name) for name in names]
        elif function == "default":
            completions = [_first_text(example, name, f"{name}_response") for name in names]
        else:
            completions = [_first_text(example, name) for name in names]
    return {
        "prompt": style.prompt(prompt, optional_text(example, "system")),
        **dict(zip(names, map(style.completion, completions))),
    }


def _chats(function: str, entry: Any, example: Row) -> dict[str, Any]:
    """`chat_template.default`: messages, and the two replies to them; others: two chats that differ in the last one."""
    names, normal = (entry.field_chosen or "chosen", entry.field_rejected or "rejected"), normaliser(entry)
    if function == "default":
        prompt = _chat(example, entry.field or "messages", normal)
        chosen, rejected = (_reply(example, name, prompt, normal) for name in names)
    else:
        prompts, (chosen, rejected) = zip(*(_split_reply(_chat(example, name, normal), name) for name in names))
        prompt = _same(*prompts)
    row = {"prompt": with_system(prompt, example, entry), "chosen": chosen, "rejected": rejected}
    return row | template_columns(example, entry)


def _columns(fields: PreferenceColumns, names: tuple[str, ...], example: Row) -> dict[str, str]:
    """A mapping of columns."""
    prompt = _first_text(example, fields.field_prompt)
    # Not str.format: formats may contain other braces, such as those of JSON or LaTeX.
    before, _, after = fields.prompt_format.partition("{prompt}")
    if prompt.strip() and "{system}" in fields.prompt_format:
        system = _first_text(example, fields.field_system)
        before, after = (part.replace("{system}", system) for part in (before, after))
    row = {"prompt": before + prompt + after if prompt.strip() else ""}
    for name in names:
        text, given = (
            _first_text(example, getattr(fields, f"field_{name}") or name),
            getattr(fields, f"{name}_format"),
        )
        row[name] = given.replace(f"{{{name}}}", text) if given is not None and text.strip() else text
    return row


def _first_text(example: Row, *names: str) -> str:
    """The text of the first of the columns that the row has."""
    found = first_shape(example, [(name,) for name in names])
    return text_of(example, *found) if found is not None else _column(example, " or ".join(names))  # raises


def _last_content(example: Row, name: str) -> str:
    _, answer = _split_reply(_chat(example, name), name)
    return _content(answer[0], name) if answer else ""


def _same(prompt: Any, other: Any = None) -> Any:
    """The prompt of both chats. Raises DataError if they differ."""
    if prompt and other and prompt != other:
        raise DataError("the chosen and the rejected chat have different messages before their last one")
    return prompt


def _column(example: Row, name: str) -> Any:
    """The value of a column. Raises DataError if the row does not have it."""
    if not has_column(example, name):
        raise DataError(
            f"the column {name!r} is missing: the row has {', '.join(example)}. Choose another type, or name the "
            "columns with type: {field_prompt: ..., field_chosen: ..., field_rejected: ...}"
        )
    return value_of(example, name)


def _chat(example: Row, name: str, normal: Normaliser | None = None) -> list[Message]:
    """The messages of a column; `normal` gives them the keys and roles of chat templates (`ebft.data.messages`)."""
    value = from_json(_column(example, name), f"column {name!r}")
    if normal is not None and isinstance(value, list):
        value = [normal(message, number) for number, message in enumerate(value)]
    return messages_of(value, f"column {name!r}")


def _reply(example: Row, name: str, asked: list[Message], normal: Normaliser) -> list[Message]:
    """The messages that a column adds to `asked`: a text, one message, or several, with or without `asked`.

    Messages may be JSON text. The last one must be an assistant turn.
    """
    value = _messages_in(_column(example, name))
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}] if value.strip() else []
    messages = _chat({name: [value] if isinstance(value, Mapping) else value}, name, normal)
    added = messages[len(asked) :] if messages[: len(asked)] == asked else messages
    _split_reply(added, name)  # raises
    return added


def _messages_in(value: Any) -> Any:
    """The message or messages in a JSON text, which have roles; another value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    each = found if isinstance(found, list) else [found]
    has_role = lambda message: isinstance(message, Mapping) and ("role" in message or "from" in message)
    return found if each and all(map(has_role, each)) else value


def _split_reply(messages: list[Message], name: str) -> tuple[list[Message], list[Message]]:
    """The prompt and the answer of a chat, which must end with an assistant turn unless it is empty."""
    if not messages:
        return [], []
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"column {name!r} ends with a message of the role {messages[-1]['role']!r}, but the last message is the "
            "answer that is compared, with the role assistant"
        )
    return messages[:-1], messages[-1:]


def _question_and_answer(example: Row, name: str) -> tuple[str, str]:
    """The texts of a chat of one question and its answer."""
    messages = _chat(example, name)
    if not messages:
        return "", ""
    if len(messages) != 2:
        raise DataError(
            f"column {name!r} has {len(messages)} messages, but this format reads one question and one answer. Use "
            "chat_template.argilla_chat, which renders all messages with the chat template"
        )
    return _content(messages[0], name), _content(messages[1], name)


def _content(message: Message, name: str) -> str:
    """The text of a message."""
    text = message.get("content")
    if not isinstance(text, str):
        raise DataError(f"a message in column {name!r} must contain text, got {type(text).__name__}")
    return text
