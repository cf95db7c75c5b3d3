"""What the rows of a dataset are, by their columns, and the entries of `datasets:` that read them.

The names of columns are those that the transforms read (`ebft.data.transforms`), and others that a mapping as `type`
or a key of the entry can name.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from datasets import Dataset

from ebft.data.messages import ANSWERS, ROW_KWARGS
from ebft.data.transforms import TRANSFORMS, Rows, built_in, equivalent_transform
from ebft.data.transforms.formats import PAIRS, STYLES
from ebft.errors import DataError, shortened

RAW_TEXT = "ebft_pretrain.transform"
_KINDS: tuple[Rows, ...] = ("tokens", "prompts")
_LOOKED_AT = 100  # rows
_TEXTS = ("text", "content", "document", "body", "article", "story", "code", "markdown")
_PROMPTS = ("prompt", "instruction", "question", "query", "input", "problem", "request", "source", "context")
_COMPLETIONS = ("completion", "response", "output", "answer", "reply", "solution", "target", "summary")
_PREFERRED = (("chosen", "rejected"), ("chosen_response", "rejected_response"), ("preferred", "dispreferred"))
_CHATS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_ROLES, _CONTENTS = ("role", "from", "speaker", "author"), ("content", "value", "text", "message")
_KNOWN_KEYS = (("role", "content"), ("from", "value"))  # of messages, which need no mapping


class Shape(NamedTuple):
    """What rows are, in words, and the keys of an entry that reads them as each kind of rows."""

    words: str
    entries: dict[Rows, dict[str, Any]]
    has_chats: bool = False  # that a chat template renders
    has_references: bool = True
    has_tools: bool = False
    reads: tuple[str, ...] = ()  # the columns, where they are known

    @property
    def is_text(self) -> bool:
        """Whether rows are texts without prompts, which are cut into windows."""
        return any(entry.get("type") == RAW_TEXT for entry in self.entries.values())


def shape_of(rows: Dataset, source: str, chat_template: str | None) -> Shape:
    """The shape of the rows of `source`, for a model with this chat template.

    Raises DataError with the columns and what is needed if it is not recognised.
    """
    columns: dict[str, Any] = dict.fromkeys(rows.column_names)  # with the first value of each that is there
    for row in rows.select(range(min(_LOOKED_AT, len(rows)))):
        columns |= {name: value for name, value in row.items() if columns[name] in (None, "", []) and value is not None}
    for found in _found(columns, chat_template):
        left = [name for name in columns if name not in found.reads] if found.reads else []
        more = f"; not read: {shortened(', '.join(left))}" if left else ""
        return found._replace(words=f"{found.words}{more}")
    seen = ", ".join(f"{name} ({type(value).__name__})" for name, value in columns.items())
    names = " or ".join(f"{prompt}/{completion}" for prompt, completion in PAIRS[:4])
    raise DataError(
        f"{source}: the columns {shortened(seen)} are of no known shape. Needed are: text; a prompt and a completion "
        f"({names}, ...); messages or conversations; chosen and rejected, with a prompt; prompt, completion and label; "
        "or prompt, completions and labels. Rename the columns, or name them: "
        "'datasets.0.type={field_instruction: COLUMN, field_output: COLUMN}' for prompts and completions, "
        "datasets.0.type=chat_template datasets.0.field_messages=COLUMN for chats, datasets.0.type=completion "
        "datasets.0.field=COLUMN for texts."
    )


def shape_of_type(entry: dict[str, Any]) -> Shape:
    """The shape that a given `type` of an entry reads; of a function of the user, any kind of rows."""
    kind = "user_defined" if isinstance(entry["type"], dict) else entry["type"]
    if isinstance(entry["type"], dict) and "field_prompt" in entry["type"]:
        return Shape("read as the type says", dict.fromkeys(("preferences", "labelled"), entry))
    name = built_in(kind)
    kinds: Iterable[Rows] = ("tokens", "prompts") if name is None else TRANSFORMS[name].rows
    twins = [other for other in ("tokens", "prompts") if name and equivalent_transform(name, other) is not None]
    formats = ("chat", "pairs", "instructions", "nemo_gym", "replies", "chats")
    is_chat = name is not None and TRANSFORMS[name].format in formats
    return Shape(f"read as type: {kind}", dict.fromkeys((*kinds, *twins), entry), is_chat)


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages in a value, or in its JSON text; empty if it is something else."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            value = json.loads(value)
        except ValueError:
            return []
    is_chat = isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    return value if is_chat and any(key in value[0] for key in _ROLES) else []


def _found(columns: dict[str, Any], template: str | None) -> Iterator[Shape]:
    """The shapes that the columns may have, the most specific first."""
    texts = [name for name, value in columns.items() if isinstance(value, str) and not _messages(value)]
    if isinstance(columns.get("completions"), list) and isinstance(columns.get("labels"), list) and "prompt" in columns:
        yield Shape("prompts with labelled steps", {"steps": {"type": "stepwise_supervised"}})
    yield from _compared(columns, texts, template)
    yield from _labelled(columns, texts, template)
    yield from _chats(columns)
    yield from _pairs(texts, template)
    name = _first(_TEXTS, texts) or (texts[0] if len(texts) == 1 else None)
    if name is not None:
        is_found = name in _TEXTS[:2] and _first(_TEXTS, list(columns)) == name and "answer" not in columns
        entry = {"type": RAW_TEXT, **({} if is_found else {"field": name})}
        yield Shape(f"texts ({name})", {"tokens": entry}, reads=(name,))


def _compared(columns: dict[str, Any], texts: list[str], template: str | None) -> Iterator[Shape]:
    pair = next((pair for pair in _PREFERRED if all(name in columns for name in pair)), None)
    if pair is None:
        return
    words, named = f"pairs of a better and a worse completion ({', '.join(pair)})", pair == _PREFERRED[0]
    if _messages(columns[pair[0]]):
        kinds = {"messages": "chat_template.default", "prompt": "passthrough"}
        kind = next(
            (kind for name, kind in kinds.items() if _messages(columns.get(name))), "chat_template.argilla_chat"
        )
        entry = {"type": kind, **({} if named else dict(zip(("field_chosen", "field_rejected"), pair)))}
        entries: dict[Rows, dict[str, Any]] = {"preferences": entry}
        if named and "prompt" not in texts and "messages" not in columns:
            entries["comparisons"] = {"type": "bradley_terry.chat_template"}
        yield Shape(f"chats, as {words}", entries, has_chats=True)
        return
    prompt = _first(_PROMPTS, texts)
    if prompt is None or not all(name in texts for name in pair):
        return
    style, mapping = _style(template), {"field_prompt": prompt, "field_chosen": pair[0], "field_rejected": pair[1]}
    if style and prompt in ("prompt", "input", "question", "instruction") and pair != _PREFERRED[2]:
        entry = {"type": f"{style}.default"}
    else:
        entry = {"type": "passthrough" if prompt == "prompt" and named else mapping}
    entries = {"preferences": entry}
    if prompt == "input" and named:
        entries["comparisons"] = {"type": "bradley_terry.chat_template"}
    yield Shape(f"{words} after a prompt ({prompt})", entries)


def _labelled(columns: dict[str, Any], texts: list[str], template: str | None) -> Iterator[Shape]:
    label = columns.get("label")
    if not isinstance(label, bool) and label not in (0, 1):
        return
    words = "completions with a label, good or bad"
    if _messages(columns.get("completion")) and _messages(columns.get("prompt")):
        yield Shape(words, {"labelled": {"type": "passthrough"}}, has_chats=True)
    prompt, completion = _first(_PROMPTS, texts), _first(_COMPLETIONS, texts)
    if prompt is None or completion is None:
        return
    entry: dict[str, Any] = {"type": {"field_prompt": prompt, "field_completion": completion, "field_label": "label"}}
    if (prompt, completion) == ("prompt", "completion"):
        style = _style(template)
        entry = {"type": f"{style}.prompt_pairs" if style else "passthrough"}
    yield Shape(f"{words} ({prompt}, {completion}, label)", {"labelled": entry})


def _chats(columns: dict[str, Any]) -> Iterator[Shape]:
    """Chats in a column with a usual name, in a prompt with its completion, or in the only column with messages."""
    found = [name for name, value in columns.items() if _messages(value)]
    name, answer = _first(_CHATS, found), _first(ANSWERS, [key for key in columns if key != "prompt"])
    is_prompted = name is None and "prompt" in found and answer is not None and isinstance(columns[answer], (str, list))
    name = "prompt" if is_prompted else name or (found[0] if len(found) == 1 else None)
    if name is None:
        return
    messages = _messages(columns[name])
    role = next(key for key in _ROLES if key in messages[0])
    content = next((key for key in _CONTENTS if any(key in each for each in messages)), "content")
    entry: dict[str, Any] = {"type": "chat_template"}
    if name not in _CHATS[:2] and not is_prompted:
        entry["field_messages"] = name
    if (role, content) not in _KNOWN_KEYS:
        entry["message_property_mappings"] = {"role": role, "content": content}
    tools = next((each for each in ("tools", "functions") if columns.get(each)), None)
    if tools == "functions":
        entry["field_tools"] = tools
    reads = (*(["prompt", answer or ""] if is_prompted else [name]), "system", tools or "tools", ROW_KWARGS)
    words = f"chats ({f'prompt, {answer}' if is_prompted else name}){f' with tools ({tools})' if tools else ''}"
    has_answers = is_prompted or not {str(each.get(role)) for each in messages} <= {"user", "human", "system"}
    if not has_answers:
        words, entry["type"] = f"{words} without answers", "ebft_chat_multiturn.transform"
    kinds = dict.fromkeys(_KINDS if has_answers else ("prompts",), entry)
    yield Shape(words, kinds, True, has_references=has_answers, has_tools=tools is not None, reads=reads)


def _pairs(texts: list[str], template: str | None) -> Iterator[Shape]:
    pair = next((pair for pair in PAIRS if all(name in texts for name in pair)), None)
    is_alpaca = {"instruction", "output"} <= set(texts)
    if pair is None:
        prompt, completion = _first(_PROMPTS, texts), _first(_COMPLETIONS, texts)
        if prompt is None or completion is None:
            return
        pair, entry = (prompt, completion), {"type": {"field_instruction": prompt, "field_output": completion}}
    elif template is not None and (is_alpaca or pair == ("question", "answer")):
        entry = {"type": "alpaca_chat"} | ({"field_system": "system"} if "system" in texts else {})
    elif template is not None:
        entry = {"type": "ebft_opencode.transform"}
    else:
        entry = {"type": "alpaca" if is_alpaca and "input" in texts else "ebft_strided_structured.transform"}
    names = ("instruction", *(["input"] if "input" in texts else []), "output") if is_alpaca else pair
    entries = {kind: entry | {"type": equivalent_transform(entry["type"], kind) or entry["type"]} for kind in _KINDS}
    reads = (*names, "system") if "field_system" in entry else names
    yield Shape(f"prompts and completions ({', '.join(names)})", entries, reads=reads)


def _first(names: Iterable[str], among: list[str]) -> str | None:
    return next((name for name in names if name in among), None)


def _style(template: str | None) -> str | None:
    """The format of preference data with the marks of a chat template."""
    marks = {name: style.header.partition("{}")[0] for name, style in STYLES.items()}
    return next((name for name, mark in marks.items() if template and mark in template), None)
