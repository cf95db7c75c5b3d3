"""What a chat template leaves out of a conversation: contents, thinking, and tool calls of its messages.

Each text of a message is looked for in the rendering; if it is not there as it is, the conversation is rendered once
more with a mark in place of every text. A text without its mark is left out if the rendering does not depend on it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterator
from copy import copy
from functools import partial
from typing import Any, NamedTuple

from ebft.data import rendering, row_counts, tokens
from ebft.data.messages import Message
from ebft.errors import DataError

_ROLES = ("system", "user", "assistant", "tool")
_MARKS = ("AEBFTA", "ZEBFTZ")  # without a common start or end
_CERTAIN = 20  # characters of a text that is not in the rendering by chance


class Text(NamedTuple):
    """A text of a message: what it is, the text, and the message with another one in its place."""

    what: str  # content, thinking, or tool calls
    field: str
    text: str
    replaced: Callable[[Message, str], Message]


class Omissions:
    """Raises DataError for texts that a template leaves out; counts the rows with such thinking of earlier turns.

    Warns once of descriptions of tools, and of texts beside calls, that it leaves out.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        self._warned: set[str] = set()
        self._checked_tools = False
        self._roles: dict[str, bool] = {}  # whether a template renders the role developer

    def check(
        self, messages: list[Message], render: rendering.ChatTemplate, trained: Collection[int], text: str | None = None
    ) -> None:
        """Check a conversation whose turns `trained` are trained on or compared; `text` is its rendering.

        Thinking of other turns, and thinking that the template renders in the last turn only, is counted.
        """
        text = render(messages) if text is None else text
        if render.tools and not self._checked_tools:
            self._checked_tools = True
            without = rendering.ChatTemplate(render.tokenizer, render.name, render.kwargs, None, render.closed)
            if without(messages) == text:
                self._warn("ignores the descriptions of tools of the rows. Use a chat_template that renders tools.")
        if _shows_all(text, messages):
            return
        for index, part in _unmarked(messages, render):
            if not _depends_on(messages, index, part, render):
                self._left_out(messages, index, part, render, index in trained)

    def with_known_roles(self, messages: list[Message], render: rendering.ChatTemplate) -> list[Message]:
        """The messages with `developer` as `system`, if the template does not render it."""
        if all(message["role"] != "developer" for message in messages):
            return messages
        key = str(render.tokenizer.chat_template)
        if key not in self._roles:
            example = [{"role": "developer", "content": _MARKS[0]}, {"role": "user", "content": "?"}]
            try:
                self._roles[key] = _MARKS[0] in render(example)
            except DataError:
                self._roles[key] = False
            if not self._roles[key]:
                self._warn("does not render the role developer; its messages are rendered as system messages.")
        if self._roles[key]:
            return messages
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]

    def check_start(self, render: rendering.ChatTemplate, text: str, start: int) -> None:
        """Warn once if the reply at `start` lacks the thinking block with which the template starts new replies."""
        size = len(render.opened_thinking)
        if render.opened_thinking not in text[max(0, start - size) : start + size]:
            self._warn(
                "starts new replies with {}, but renders replies of the rows without it, so the model is asked for "
                "another text than it is trained on. Use rows with thinking, or chat_template_kwargs (such as "
                "enable_thinking: false) with which both agree.",
                repr(render.opened_thinking),
            )

    def check_end(self, message: Message, end: str) -> None:
        """Warn once if a reply that is trained on is rendered without an end."""
        if message["role"] == "assistant" and not message.get("tool_calls") and not end.strip():
            self._warn(
                "writes nothing after a reply, so the model does not learn to stop. Use a template that ends turns."
            )

    def _warn(self, problem: str, example: str = "") -> None:
        """One warning of a problem of the template, whatever the example is."""
        if problem not in self._warned:
            self._warned.add(problem)
            warnings.warn(f"chat template {self.template} {problem.format(example)}", stacklevel=3)

    def _left_out(
        self, messages: list[Message], index: int, part: Text, render: rendering.ChatTemplate, is_trained: bool
    ) -> None:
        message = messages[index]
        if part.what == "thinking":
            is_last = index == len(messages) - 1
            if not is_trained or (not is_last and _depends_on(messages[: index + 1], index, part, render)):
                row_counts.note_lost(row_counts.UNTHINKING if is_trained else row_counts.LEFT_OUT)
                return
        if part.what == "content" and message.get("tool_calls"):
            self._warn(
                "leaves out the text of turns that also call tools (for example {}), so the model does not see it. Use "
                "a chat_template that renders both.",
                f"{part.text!r:.60}",
            )
            return
        role, fix = message["role"], "Use another chat_template"
        if role not in _ROLES:
            fix += f", or name the role of the template in `roles` of the dataset: `roles: {{assistant: [{role}]}}`"
        elif part.what == "thinking":
            fix += ", such as a training template of TRL, or for thinking in a key, set field_thinking to this key and "
            fix += "`template_thinking_key: content` of the dataset"
        use = "so it cannot be trained on" if is_trained else "so it would be missing from the prompt"
        omits = f"chat template {self.template} omits the {part.what} of message {index} ({role})"
        raise DataError(f"{omits} in its key {part.field}, {use}. {fix}.")


def texts_of(message: Message) -> Iterator[Text]:
    """The texts of a message that a template has to render."""
    for key in tokens.THINKING:
        if isinstance(message.get(key), str) and message[key].strip():
            yield Text("thinking", key, message[key].strip(), partial(_put, [key], str))
    content = message.get("content")
    if isinstance(content, str):
        for number, (what, start, end) in enumerate(_spans(content, message["role"] == "assistant")):
            if start < end:
                yield Text(what, "content", content[start:end], partial(_put_into_content, number))
    elif content:  # the result of a tool as an object
        text = json.dumps(content, ensure_ascii=False)
        yield Text("content", "content", text, partial(_put, ["content"], lambda mark: {mark: mark}))
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        path = ["tool_calls", number, *(["function"] if "function" in call else [])]
        if isinstance(function.get("name"), str) and function["name"]:
            yield Text("tool calls", "name", function["name"], partial(_put, [*path, "name"], str))
        arguments = function.get("arguments")
        if arguments and str(arguments).strip() not in ("{}", "null"):
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            written = (lambda mark: json.dumps({mark: mark})) if text is arguments else lambda mark: {mark: mark}
            yield Text("tool calls", "arguments", text, partial(_put, [*path, "arguments"], written))


def _spans(content: str, is_reply: bool) -> list[tuple[str, int, int]]:
    """The ranges of the content, which are alternately text and thinking without tags; both can be empty."""
    done, found = 0, []
    for start, end in tokens.thinking_spans(content) if is_reply else ():
        opening = next((tag for tag, _ in tokens.TAGS if content.startswith(tag, start)), "")
        thought = tokens.split_thinking(content[start:end])[0]
        first = content.find(thought, start + len(opening))
        found += [("content", *_stripped(content, done, start)), ("thinking", first, first + len(thought))]
        done = end
    return [*found, ("content", *_stripped(content, done, len(content)))]


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    """The range without white space at its ends."""
    inner = text[start:end].lstrip()
    return end - len(inner), end - len(inner) + len(inner.rstrip())


def _put(path: list[Any], marked: Callable[[str], Any], value: Any, mark: str) -> Any:
    """A copy of a message, or of a part of it, with `marked(mark)` at the path of keys."""
    changed, (key, *rest) = copy(value), path
    changed[key] = _put(rest, marked, value[key], mark) if rest else marked(mark)
    return changed


def _put_into_content(number: int, message: Message, mark: str) -> Message:
    _, start, end = _spans(message["content"], message["role"] == "assistant")[number]
    return {**message, "content": message["content"][:start] + mark + message["content"][end:]}


def _shows_all(rendered: str, messages: list[Message]) -> bool:
    """Whether all texts are in the rendering as they are and in order, and long enough not to be there by chance."""
    at = 0
    for message in messages:
        for part in texts_of(message):
            found = rendered.find(part.text, at) if len(part.text) >= _CERTAIN else -1
            if found < 0:
                return False
            at = found + len(part.text)
    return True


def _unmarked(messages: list[Message], render: rendering.ChatTemplate) -> list[tuple[int, Text]]:
    """The texts whose marks are not in the rendering with marks; all texts if the template refuses the marks."""
    found, marked = [], []
    for index, message in enumerate(messages):
        changed = message
        for part in texts_of(message):
            mark = f"EBFT{len(found)}EBFT"
            changed = part.replaced(changed, mark)
            found.append((index, part, mark))
        marked.append(changed)
    try:
        text = render(marked)
    except DataError:
        text = ""
    return [(index, part) for index, part, mark in found if mark not in text]


def _depends_on(messages: list[Message], index: int, part: Text, render: rendering.ChatTemplate) -> bool:
    """Whether the rendering depends on a text, which is so if the template refuses a mark."""
    chats = ([*messages[:index], part.replaced(messages[index], mark), *messages[index + 1 :]] for mark in _MARKS)
    try:
        return len({render(chat) for chat in chats}) > 1
    except DataError:
        return True
