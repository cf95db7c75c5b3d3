"""Rows of preference data as token ids: the prompt, and each completion with the token that ends it.

Texts are tokenised separately, so that no token spans the boundary. A chat is tokenised as a whole, as the chat
template renders it; the prompt is what the chats of all completions have in common with the generation prompt. Only the
tokens of completions are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ebft.data.apply import RowCounts, apply_transform
from ebft.data.chats import normaliser, template_columns, with_system
from ebft.data.keys import DataSettings
from ebft.data.lengths import COMPLETION_TOO_LONG, DROPPED, NO_COMPLETION, NO_PROMPT
from ebft.data.load import LoadedRows, LoadEntry, load_sections
from ebft.data.messages import Message, messages_of
from ebft.data.rendering import TOOLS, ChatTemplate, row_kwargs, split_by_template, split_markers, warn_of_split_markers
from ebft.data.tokens import Tokens, ids_after
from ebft.data.transforms import PreferenceColumns, wanted_rows
from ebft.data.transforms.labels import Places
from ebft.data.transforms.omissions import Omissions
from ebft.data.transforms.rows import continued_ids, text_of
from ebft.errors import DataError

Text = str | list[Message]

_IDS = List(Value("int32"))
_OTHERS = {"reason": Value("string"), "document": Value("int64")}  # an empty reason if the row is kept
FEATURES = {
    "preferences": Features({"prompt_ids": _IDS, "chosen_ids": _IDS, "rejected_ids": _IDS, **_OTHERS}),
    "labelled": Features({"prompt_ids": _IDS, "completion_ids": _IDS, "label": Value("bool"), **_OTHERS}),
}
COMPLETIONS = {"preferences": ("chosen", "rejected"), "labelled": ("completion",)}


class PreferenceRow:
    """Converts the result of a transform to the columns of `FEATURES`. Raises DataError that names an invalid field."""

    def __init__(
        self,
        config: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.sequence_len = tokenizer, config.sequence_len
        self.kind = config.required_rows.kind
        self.hint = wanted_rows(config.required_rows)
        kwargs = {**(config.required_rows.chat_template_kwargs or {}), **(chat_template_kwargs or {})}
        self.template = ChatTemplate(tokenizer, config.chat_template, kwargs)
        self.omissions = Omissions(self.template.name)

    def __call__(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        try:
            return self._tokenised(row)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    def _tokenised(self, row: Mapping[str, Any]) -> dict[str, Any]:
        names = COMPLETIONS[self.kind]
        missing = [name for name in ("prompt", *names, *self._others()) if name not in row]
        if missing:
            raise DataError(
                f"the field {missing[0]!r} is missing; the transform returned {', '.join(row)}, but {self.hint}"
            )
        prompt, *completions = (_text(row[name], name) for name in ("prompt", *names))
        if len({type(text) for text in (prompt, *completions) if not _is_empty(text)}) > 1:
            raise DataError(f"prompt, {' and '.join(names)} must all be text, or all lists of messages")
        others = {name: _label(row[name]) for name in self._others()}
        reason = NO_PROMPT if _is_empty(prompt) else NO_COMPLETION if any(map(_is_empty, completions)) else ""
        prompt_ids, completion_ids = ([], [[] for _ in names]) if reason else self._ids(row, prompt, completions)
        if not reason and len(prompt_ids) + max(map(len, completion_ids)) > self.sequence_len:
            reason = COMPLETION_TOO_LONG
        columns = {f"{name}_ids": ids for name, ids in zip(names, completion_ids, strict=True)}
        return {"prompt_ids": prompt_ids, **columns, **others, "reason": reason}

    def _others(self) -> tuple[str, ...]:
        return ("label",) if self.kind == "labelled" else ()

    def _ids(self, row: Mapping[str, Any], prompt: Text, completions: list[Text]) -> tuple[list[int], list[list[int]]]:
        if isinstance(prompt, str):
            return continued_ids(self.tokenizer, prompt), [self._ended(prompt, text) for text in completions]
        template = self.template.with_tools(row.get(TOOLS), row_kwargs(row))
        prompt, *completions = (
            self.omissions.with_known_roles(messages, template) for messages in (prompt, *completions)
        )
        chats = [[*prompt, *completion] for completion in completions]
        texts = [Tokens(self.tokenizer, template(chat)) for chat in chats]
        for tokens, chat in zip(texts, chats, strict=True):
            self.omissions.check(chat, template, range(len(prompt), len(chat)), tokens.text)
        start = template(prompt, add_generation_prompt=True)
        if not all(tokens.text.startswith(start) for tokens in texts):
            start = self._shared_start(template, chats, len(prompt))
        # A token can span the boundary in one of the chats only.
        length = min(tokens.before(len(start)) for tokens in texts)
        length = len(commonprefix([tokens.ids[:length] for tokens in texts]))
        return texts[0].ids[:length], [tokens.ids[length:] for tokens in texts]

    def _shared_start(self, template: ChatTemplate, chats: list[list[Message]], replied: int) -> str:
        """The prompt as it is rendered before the completions, if that is not how it is rendered on its own."""
        places = [Places(template, chat) for chat in chats]
        starts = {found.text[: found.of(replied).start] for found in places}
        if len(starts) > 1:
            raise DataError(
                f"chat template {template.name} renders the messages before the completions differently before each of "
                "them, so the prompt cannot be separated from the completions. Use another chat_template"
            )
        return starts.pop()

    def _ended(self, prompt: str, text: str) -> list[int]:
        """The ids of a completion, which ends with EOS, so that the model learns where to stop."""
        ids = ids_after(self.tokenizer, prompt, text)
        if self.tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no EOS token to end a completion with. Set special_tokens.eos_token")
        return ids if ids[-1:] == [self.tokenizer.eos_token_id] else [*ids, self.tokenizer.eos_token_id]


def _text(value: Any, name: str) -> Text:
    if value is None or isinstance(value, str):
        return value or ""
    return messages_of(value, name)


def _is_empty(text: Text) -> bool:
    if isinstance(text, str):
        return not text.strip()
    return not any(str(message.get("content") or "").strip() or message.get("tool_calls") for message in text)


def _label(value: Any) -> bool:
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise DataError(f"label must be true (desirable) or false, got {value!r:.60}. Convert the column to booleans")


def load_preference_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """The training rows and the evaluation rows (None if the config holds no data out).

    Columns: `prompt_ids`, and `chosen_ids` and `rejected_ids`, or `completion_ids` and `label`. Rows are not cut: those
    whose prompt and longest completion exceed `sequence_len` are dropped, with a count for each reason. Raises
    DataError if a source cannot be read, a row is malformed, or no usable rows are left.
    """
    train, evaluation, reports = load_sections(config, preference_rows(config, tokenizer), hint(config))
    evaluation = None if evaluation is None else evaluation.remove_columns("document")
    return LoadedRows(train.remove_columns("document"), evaluation, reports)


def preference_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadEntry:
    """Return a function that loads the usable rows of a source."""
    features = FEATURES[config.required_rows.kind]
    warned: set[str] = set()  # styles

    def load_entry(entry: Any, raw: Dataset, first_document: int, counts: RowCounts) -> Dataset:
        style = str(entry.type).partition(".")[0]
        if style in STYLES and style not in warned:
            warned.add(style)
            _warn_of_markers(tokenizer, entry.type)
        check = PreferenceRow(config, tokenizer, entry.chat_template_kwargs)
        rows = apply_transform(raw, entry, config, tokenizer, check, features, first_document, counts)
        reasons, documents = np.asarray(rows["reason"]), np.asarray(rows["document"])
        for reason in DROPPED:
            counts[reason] += int((reasons == reason).sum())
            counts.note(reason, documents[reasons == reason].tolist())
        return rows.select(np.flatnonzero(reasons == "")).remove_columns("reason")

    return load_entry


def _warn_of_markers(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Warn of split markers of a text format, unless the chat template writes them too: it has its own warning."""
    style = STYLES[name.partition(".")[0]]
    known = split_by_template(tokenizer)
    split = split_markers(tokenizer, style.system + style.user + style.end)
    warn_of_split_markers(f"datasets.type: {name}", [marker for marker in split if marker not in known])


def hint(config: DataSettings) -> str:
    """The advice if no rows are left."""
    return (
        "provide rows whose prompt and completions are not empty, and fit within sequence_len: "
        f"{config.sequence_len} together, or increase it."
    )


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
    return partial(_labelled_text if is_labelled else _column_text, STYLES[module], function)


def _column_text(style: Style, function: str, example: Row) -> dict[str, str]:
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
