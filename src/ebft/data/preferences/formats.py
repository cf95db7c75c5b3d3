"""The formats of preference data: from a raw row to a prompt with its completions, as texts or as messages.

A transform returns `prompt`, `chosen` and `rejected`, or for `rl: kto` `prompt`, `completion` and `label`. A missing or
empty text stays empty, so that the row is counted and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ebft.data.chats import normaliser, template_columns, with_system
from ebft.data.keys import PreferenceColumns
from ebft.data.messages import Message, messages_of
from ebft.data.transforms.rows import text_of
from ebft.errors import DataError

Row = Mapping[str, Any]
# The column of the prompt in formats of texts. Those that are not here have messages.
_PROMPT = {"intel": "question", "icr": "input", "prompt_pairs": "prompt", "ultra": "prompt", "argilla": "instruction"}
# `default` takes the first column of each that is there.
_DEFAULT = (
    ("prompt", "input", "question", "instruction"),
    ("chosen", "chosen_response"),
    ("rejected", "rejected_response"),
)


def format_transform(name: str | PreferenceColumns) -> Callable:
    """The transform of a format, or of a mapping of columns: a function of the config and the dataset entry."""

    def transform(cfg: Any, dataset: Any, **kwargs: Any) -> tuple[Callable, dict[str, Any]]:
        read = _reader(name, dataset, is_labelled=cfg.required_rows.kind == "labelled")
        return (lambda example, tokenizer=None: read(example)), {"remove_columns": "__all__"}

    return transform


def _reader(name: str | PreferenceColumns, entry: Any, is_labelled: bool) -> Callable[[Row], dict[str, Any]]:
    if isinstance(name, PreferenceColumns):
        return partial(_labelled_columns if is_labelled else _columns, name)
    if name == "passthrough":
        columns = ("prompt", "completion", "label") if is_labelled else ("prompt", "chosen", "rejected")
        return lambda example: {
            **{key: column(example, key) for key in columns},
            **template_columns(example, entry),
        }
    module, _, function = name.rpartition(".")
    if module == "chat_template":
        return partial(_chat if function == "default" else _whole_chats, entry)
    return partial(_labelled_text if is_labelled else _text, STYLES[module], function)


def _text(style: Style, function: str, example: Row) -> dict[str, str]:
    """`chatml.*` and `llama3.*` for pairs."""
    columns = ("chosen", "rejected")
    if function == "argilla_chat":
        (prompt, chosen), (other, rejected) = (question_and_answer(example, name) for name in columns)
        _check_same(prompt, other)
    elif function == "ultra":
        prompt = text_of(example, _column(example, ("prompt",)))
        chosen, rejected = (_last_content(example, name) for name in columns)
    else:
        given, *columns = _DEFAULT if function == "default" else ((_PROMPT[function],), ("chosen",), ("rejected",))
        prompt = text_of(example, _column(example, given))
        chosen, rejected = (text_of(example, _column(example, names)) for names in columns)
    texts = {"chosen": style.completion(chosen), "rejected": style.completion(rejected)}
    return {"prompt": style.prompt(prompt, _system(example)), **texts}


def _labelled_text(style: Style, function: str, example: Row) -> dict[str, Any]:
    """`chatml.*` and `llama3.*` for completions with a label."""
    if function == "argilla_chat":
        prompt, completion = question_and_answer(example, "completion")
    else:
        prompt = text_of(example, _column(example, (_PROMPT[function],)))
        completion = text_of(example, _column(example, ("completion",)))
    texts = {"prompt": style.prompt(prompt, _system(example)), "completion": style.completion(completion)}
    return {**texts, "label": column(example, "label")}


def _chat(entry: Any, example: Row) -> dict[str, list[Message]]:
    """`chat_template.default`: messages, and the two replies to them."""
    normal = normaliser(entry)
    asked = chat(example, entry.field or "messages", normal)
    chosen, rejected = (
        reply(example, name, asked, normal)
        for name in (entry.field_chosen or "chosen", entry.field_rejected or "rejected")
    )
    messages = {"prompt": with_system(asked, example, entry), "chosen": chosen, "rejected": rejected}
    return messages | template_columns(example, entry)


def _whole_chats(entry: Any, example: Row) -> dict[str, list[Message]]:
    """`chat_template.argilla_chat` and `argilla`: two chats that differ in their last message."""
    names = (entry.field_chosen or "chosen", entry.field_rejected or "rejected")
    normal = normaliser(entry)
    found = [split_reply(chat(example, name, normal), name) for name in names]
    (prompt, chosen), (other, rejected) = found
    _check_same(prompt, other)
    messages = {"prompt": with_system(prompt, example, entry), "chosen": chosen, "rejected": rejected}
    return messages | template_columns(example, entry)


def _columns(fields: PreferenceColumns, example: Row) -> dict[str, str]:
    """A mapping of columns for pairs."""
    row = {"prompt": _prompt_of(fields, example)}
    for name in ("chosen", "rejected"):
        row[name] = _formatted(fields, name, example)
    return row


def _labelled_columns(fields: PreferenceColumns, example: Row) -> dict[str, Any]:
    """A mapping of columns for completions with a label."""
    completion = _formatted(fields, "completion", example)
    label = column(example, fields.field_label or "label")
    return {"prompt": _prompt_of(fields, example), "completion": completion, "label": label}


def _prompt_of(fields: PreferenceColumns, example: Row) -> str:
    prompt = text_of(example, _column(example, (fields.field_prompt,)))
    if not prompt.strip():
        return ""
    # Not str.format: formats may contain other braces, such as those of JSON or LaTeX.
    before, found, after = fields.prompt_format.partition("{prompt}")
    if "{system}" in fields.prompt_format:
        system = text_of(example, _column(example, (fields.field_system,)))
        before, after = (part.replace("{system}", system) for part in (before, after))
    return before + prompt + after


def _formatted(fields: PreferenceColumns, name: str, example: Row) -> str:
    text = text_of(example, _column(example, (getattr(fields, f"field_{name}") or name,)))
    given = getattr(fields, f"{name}_format")
    return given.replace(f"{{{name}}}", text) if given is not None and text.strip() else text


def _column(example: Row, names: tuple[str, ...]) -> str:
    """The first of the columns that the row has."""
    found = next((name for name in names if name in example), None)
    if found is None:
        column(example, " or ".join(names))  # raises
    return found


def _system(example: Row) -> str:
    return text_of(example, "system") if "system" in example else ""


def _last_content(example: Row, name: str) -> str:
    _, answer = split_reply(chat(example, name), name)
    return content(answer[0], name) if answer else ""


def _check_same(prompt: Any, other: Any) -> None:
    if prompt and other and prompt != other:
        raise DataError("the chosen and the rejected chat have different messages before their last one")


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
