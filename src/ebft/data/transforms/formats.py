"""Formats: which columns of a row are the prompt, the chat and the replies, and how prompts of texts are written.

A row becomes an `Example`. Raw text, from the entry's `field`, else `text`, `content`, or a question followed by its
answer (the columns of the paper authors' datasets), is a reply to an empty prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ebft.config.section import PromptFormat
from ebft.data.messages import Message, chat_in_json, chat_of, normaliser, read_chat, with_system
from ebft.data.row_counts import first_present, first_shape, optional_text, text_of, value_of
from ebft.data.tokens import THINKING
from ebft.data.transforms import PROMPTS, TRANSFORMS, PreferenceColumns, built_in
from ebft.errors import DataError

Text = str | list[Message]
Row = Mapping[str, Any]


@dataclass
class Example:
    """A prompt and the replies to it, all texts or all messages; of a whole chat, the prompt is all of it."""

    prompt: Text
    replies: list[Text] = field(default_factory=list)


class Style(NamedTuple):
    """How turns are written as text: the header of a role, the end of a turn, and what is between two turns."""

    header: str
    end: str
    between: str

    def prompt(self, messages: list[Message]) -> str:
        """Turns up to the beginning of a reply; empty if there are none."""
        turns = "".join(f"{self._turn(message)}{self.between}" for message in messages)
        return f"{turns}{self.header.format('assistant')}" if messages else ""

    def reply(self, messages: list[Message]) -> str:
        """The text of a reply, with its end."""
        text = self.between.join(map(self._turn, messages))
        return text.removeprefix(self.header.format("assistant"))

    def _turn(self, message: Message) -> str:
        content = message.get("content")
        if not isinstance(content, str) or message.keys() & {"tool_calls", *THINKING}:
            raise DataError(
                "a message has more than text (such as tool calls or thinking), which this format cannot write. Use "
                "a type of chat_template, which renders messages with the chat template"
            )
        return f"{self.header.format(message['role'])}{content}{self.end}"


STYLES = {
    "chatml": Style("<|im_start|>{}\n", "<|im_end|>", "\n"),
    "llama3": Style("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", ""),
}
PAIRS = (
    ("input", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("prompt", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("problem", "solution"),
)
INSTRUCTIONS = (("question", "answer"), ("instruction", "output"))


class Format(NamedTuple):
    """The columns of the parts of a row; of several, the first that the row has.

    A prompt and its answer are in `pairs`; compared replies answer what is in `prompts`, or are whole chats without
    it, as they may be with `is_optional`. `style` writes the turns as text, else a chat template renders them; texts
    stay texts with `is_text`.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    prompts: tuple[str, ...] = ()
    style: Style | None = None
    is_text: bool = False
    is_optional: bool = False


_QUESTIONS = {  # the columns of the prompt in formats of `chatml.*` and `llama3.*`
    "default": ("prompt", "input", "question", "instruction"),
    "intel": ("question",),
    "icr": ("input",),
    "prompt_pairs": ("prompt",),
    "ultra": ("prompt",),
    "argilla": ("instruction",),
    "argilla_chat": (),
}
FORMATS = {
    "texts": Format(pairs=PAIRS, is_text=True),
    "pairs": Format(pairs=PAIRS),
    "instructions": Format(pairs=INSTRUCTIONS),
    "replies": Format(prompts=("messages",)),
    "chats": Format(),
    "any": Format(prompts=("prompt", "messages", "input"), is_optional=True),
    "as_is": Format(prompts=("prompt",), is_text=True),
    **{
        f"{name}.{function}": Format(prompts=prompts, style=style)
        for name, style in STYLES.items()
        for function, prompts in _QUESTIONS.items()
    },
}
_MAPPING = "Use another type, or name columns in type: {field_prompt: ..., field_chosen: ..., field_completion: ...}."
_NAMES = "Name its columns with a mapping as type: {field_instruction: ..., field_input: ..., field_output: ...}."


def reader(name: str, entry: Any, replies: tuple[str, ...] = ()) -> Callable[[Row], Example]:
    """The function that reads an example of the format `name`; `replies` are the columns that are compared."""
    if name == "chat":
        return lambda row: Example(chat_of(row, entry))
    if name == "text":
        return lambda row: Example("", [_raw_text(row, entry.field)])
    if name in ("alpaca", "user_defined"):
        return lambda row: _written(row, _prompt_format(name, entry))
    if name == "mapping":
        return lambda row: _columns(row, entry.type, replies)
    found = FORMATS[name]
    if entry.field and name in ("replies", "any"):
        found = found._replace(prompts=(entry.field,))
    return lambda row: _pair(row, found, entry) if found.pairs else _compared(row, found, entry, replies)


def _prompt_format(name: str, entry: Any) -> PromptFormat:
    return PromptFormat(**PROMPTS[name]) if name == "alpaca" else entry.user_defined or PromptFormat()


def written_prompt(entries: Sequence[Any]) -> Callable[[str], str | list[Message]]:
    """How these datasets write a question: as the first if all are texts, else as a chat, with their system prompt."""
    formats = [name and TRANSFORMS[name].format for name in (built_in(entry.type) for entry in entries)]
    if not formats or not {*formats} <= {"text", "texts", "segments", "alpaca", "user_defined"}:
        prompts = {entry.system_prompt for entry in entries}
        system = [{"role": "system", "content": text} for text in prompts if text and len(prompts) == 1]
        return lambda question: [*system, {"role": "user", "content": question}]
    if formats[0] not in ("alpaca", "user_defined"):
        return str
    keys = _prompt_format(formats[0], entries[0])
    given = [keys.field_instruction] if "{instruction}" in keys.format else [keys.field_instruction, keys.field_input]
    return lambda question: _written({**dict.fromkeys(given, question), keys.field_output: ""}, keys).prompt


def _raw_text(row: Row, column: str | None) -> str:
    is_pair = column is None and "answer" in row
    columns = [column] if column else ["text", "content", "question", *(["prompt"] if is_pair else [])]
    hint = "Set `field` of the entry to its name, or use the columns question and answer, or prompt and answer."
    found = first_present(row, columns, "text", hint)
    return text_of(row, found) + (text_of(row, "answer") if is_pair and found in ("question", "prompt") else "")


def _pair(row: Row, given: Format, entry: Any) -> Example:
    """A prompt, which an instruction and its input form together, and its answer; as texts or as turns."""
    found = first_shape(row, given.pairs)
    if found is None:
        raise DataError(
            f"no prompt and completion columns: supported pairs are {', '.join(map('/'.join, given.pairs))}, but the "
            f"row has {', '.join(row)}. {_NAMES}"
        )
    prompt, completion = (text_of(row, name) for name in found)
    if found[0] in ("instruction", "input"):
        prompt = "\n\n".join(text for name in ("instruction", "input") if (text := optional_text(row, name)))
    if given.is_text:
        return Example(prompt, [completion])
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return Example(with_system(messages, row, entry))


def _written(row: Row, keys: PromptFormat) -> Example:
    """A prompt that is written out with the columns of a row."""
    instruction = text_of(row, first_present(row, [keys.field_instruction], "the instruction", _NAMES))
    output = text_of(row, first_present(row, [keys.field_output], "the completion", _NAMES))
    given = optional_text(row, keys.field_input)
    system = (optional_text(row, keys.field_system) if keys.system_format else "") or keys.system_prompt or ""
    written = keys.format
    if not given and keys.no_input_format is not None:
        written = keys.no_input_format
    elif not given and written == PromptFormat.model_fields["format"].default:
        written = "{instruction}"
    start = keys.system_format.format(system=system) if system else ""
    return Example(start + written.format(instruction=instruction, input=given), [output])


def _columns(row: Row, fields: PreferenceColumns, names: tuple[str, ...]) -> Example:
    """A mapping of columns. Not str.format: formats may contain other braces, such as in JSON or LaTeX."""
    prompt = text_of(row, first_present(row, [fields.field_prompt], "the prompt", _MAPPING))
    before, _, after = fields.prompt_format.partition("{prompt}")
    if prompt.strip() and "{system}" in fields.prompt_format:
        system = text_of(row, first_present(row, [fields.field_system], "the system message", _MAPPING))
        before, after = (part.replace("{system}", system) for part in (before, after))
    replies = []
    for name in names:
        text = text_of(row, first_present(row, [getattr(fields, f"field_{name}") or name], name, _MAPPING))
        given = getattr(fields, f"{name}_format")
        replies.append(given.replace(f"{{{name}}}", text) if given is not None and text.strip() else text)
    return Example(before + prompt + after if prompt.strip() else "", replies)


def _compared(row: Row, given: Format, entry: Any, names: tuple[str, ...]) -> Example:
    """The replies in the columns `names` to what the row asks, or whole chats that end with them."""
    shapes = {name: (getattr(entry, f"field_{name}", None) or name, f"{name}_response") for name in names}
    columns = [first_present(row, shape, f"the {name} reply", _MAPPING) for name, shape in shapes.items()]
    values = [value_of(row, column) for column in columns]
    values = values if given.is_text else list(map(chat_in_json, values))
    has_prompt = given.prompts and (not given.is_optional or first_shape(row, [(name,) for name in given.prompts]))
    column = first_present(row, given.prompts, "the prompt", _MAPPING) if has_prompt else None
    asked = None if column is None else value_of(row, column)
    if given.is_text and isinstance(asked, str) and all(isinstance(value, str | None) for value in values):
        return Example(asked, [value or "" for value in values])
    if given.style or given.is_optional:
        asked = asked if given.is_text else chat_in_json(asked)
    normal = normaliser(entry)
    is_text = isinstance(asked, str) and bool(given.style or given.is_optional or given.is_text)
    if is_text:
        question = [{"role": "user", "content": asked}] if asked.strip() else []
    else:
        question = read_chat(asked, f"column {column!r}", normal)
    if given.is_optional and question and question[-1]["role"] == "assistant":  # one of the replies, or a whole chat
        question = question[:-1] if all(isinstance(value, str | None) for value in values) else []
    found = [_continued(question, _reply(value, name, normal), name, is_text) for value, name in zip(values, columns)]
    starts = [before for before, added in found if added] or [found[0][0]]
    if any(start != starts[0] for start in starts):
        raise DataError(
            "the chosen and the rejected chat have different messages before their last one. Provide two replies to "
            "the same messages; if replies consist of several messages, put what they have in common into 'prompt'"
        )
    example = Example(with_system(starts[0], row, entry), [added for _, added in found])
    if given.style is None:
        return example
    return Example(given.style.prompt(example.prompt), [given.style.reply(reply) for reply in example.replies])


def _reply(value: Any, column: str, normal: Callable[[Any, int], Any]) -> list[Message]:
    """The messages of a reply: a text, one message, or several, the last one of the assistant."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}] if value.strip() else []
    messages = read_chat([value] if isinstance(value, Mapping) else value, f"column {column!r}", normal)
    if messages and messages[-1]["role"] != "assistant":
        raise DataError(
            f"column {column!r} ends with a message of the role {messages[-1]['role']!r}, but the last message is the "
            "answer that is compared, with the role assistant"
        )
    return messages


def _continued(
    asked: list[Message], messages: list[Message], column: str, is_text: bool
) -> tuple[list[Message], list[Message]]:
    """The messages before a reply, and the reply, of a column with the reply to `asked` or with the whole chat."""
    if not messages or (asked and messages[0]["role"] in ("assistant", "tool")):
        return asked, messages
    said = [str(message.get("content")).strip() for message in messages if message["role"] == "user"]
    if not asked or (is_text and str(asked[0]["content"]).strip() in said):
        return messages[:-1], messages[-1:]
    if messages[: len(asked)] == asked:
        return asked, messages[len(asked) :]
    skipped = 1 if messages[0]["role"] == "system" and asked[0]["role"] != "system" else 0
    if skipped and messages[1 : len(asked) + 1] == asked:
        return messages[: len(asked) + 1], messages[len(asked) + 1 :]
    if asked[-1]["role"] == "user":
        raise DataError(
            f"column {column!r} starts with a message of the role {messages[0]['role']!r} that is not in the column of "
            "the prompt. Provide whole conversations that start with the prompt, or only the replies to it."
        )
    return asked, messages
