"""Where turns are in a rendered chat, for templates that render a message differently if other messages follow it.

Examples are templates that omit the thinking of earlier turns, or that write another end after the last turn. A message
is found by changing its text: the rendering is the same before and after it.
"""

import re
from collections.abc import Callable
from os.path import commonprefix
from typing import Any, NamedTuple

from ebft.config.section import EOS
from ebft.data.messages import Message, is_context, replies, role_names
from ebft.data.rendering import ChatTemplate
from ebft.data.tokens import TAGS
from ebft.errors import DataError

# Two texts without a common start or end, so that what they share with the rendering is outside of the message.
_MARKS = ("AEBFT-MARK-A", "ZEBFT-MARK-Z")
_THINKING = [tag for pair in TAGS for tag in pair]
_NAMES = ("role", "name", "id", "tool_call_id")  # texts of a message that are not its contents


class Place(NamedTuple):
    """Character range of a turn in the rendered chat, and where its end begins, None if that was not looked for."""

    start: int
    ends: int | None
    stop: int


class Places:
    """Finds turns in the rendering of a whole chat by a chat template."""

    def __init__(self, render: ChatTemplate, messages: list[Message]) -> None:
        self.render, self.messages, self.template = render, messages, render.name
        self.text = render(messages)
        self.special = re.compile("|".join(re.escape(token) for token in render.special if token) or "(?!)")
        self._contents: dict[int, tuple[int, int] | None] = {}
        self._looked_for_all = False

    def of(self, index: int) -> Place:
        """The turn `index`: a reply from the end of its header, another turn from its content, with what ends it."""
        content = self._content(index)
        if content is None:
            what = "tool calls" if self.messages[index].get("tool_calls") else "content"
            raise DataError(
                f"chat template {self.template} omits the {what} of {self._named(index)}, so it cannot be trained on. "
                "Use another chat_template."
            )
        is_reply = self.messages[index]["role"] == "assistant" and index > 0
        start = self._reply_start(index, content[0]) if is_reply else content[0]
        stop = self._stop(index, content[1])
        ends = content[1]
        if self.messages[index].get("tool_calls"):
            found = self.special.search(self.text, ends, stop)
            ends = found.start() if found else stop
        return Place(start, ends, stop)

    def _reply_start(self, index: int, content: int) -> int:
        """The end of the generation prompt, as far as it is in the chat."""
        before = self.messages[:index]
        asked = self.render(before, add_generation_prompt=True)
        done, done_asked = self._last_content_end(index, asked, before)
        header, header_asked = self.text[done:content], asked[done_asked:]
        if content < done:
            raise DataError(
                f"chat template {self.template} renders earlier messages differently depending on the content of "
                f"{self._named(index)}, so the prompt cannot be separated from the reply. Use another chat_template."
            )
        if header.startswith(header_asked):
            return done + len(header_asked)
        if header_asked.startswith(header):  # such as the opening tag of a thinking block
            # White space that goes on in one of the two is another token there.
            goes_on = header_asked[len(header) :][:1].isspace() and not self.text[content:].startswith("\n")
            return done + len(header.rstrip() if goes_on else header)
        common = re.sub(r"[<|/\w]+$", "", commonprefix([header, header_asked]))
        if header[len(common) :][:1].isspace() or header_asked[len(common) :][:1].isspace():
            common = common.rstrip()
        rest, rest_asked = header[len(common) :], header_asked[len(common) :]
        # Such as a block that the generation prompt opens and the reply closes; its tags can be special tokens.
        differs = self.special.search(rest) or self.special.search(rest_asked)
        if common.strip() and (not differs or _only_opens_thinking(header_asked, rest_asked)):
            return done + len(common)
        raise DataError(
            f"chat template {self.template} writes another text before {self._named(index)} than before a new reply, "
            "so the prompt cannot be separated from the reply. Use another chat_template."
        )

    def _last_content_end(self, index: int, asked: str, before: list[Message]) -> tuple[int, int]:
        """Ends of the last message before `index` that is rendered, in the chat and in the prompt `asked`."""
        for earlier in reversed(range(index)):
            here = self._content(earlier)
            if here is not None and asked.startswith(self.text[: here[1]]):
                return here[1], here[1]
            there = _content_range(asked, self.render, before, earlier, add_generation_prompt=True)
            if here is not None and there is not None:
                return here[1], there[1]
        return 0, 0

    def _stop(self, index: int, content: int) -> int:
        """The end of what the template writes after the content."""
        later = (self._content(other) for other in range(index + 1, len(self.messages)))
        following = next((found for found in later if found is not None), None)
        if following is None:
            return len(self.text)
        gap = self.text[content : max(content, following[0])]
        alone = self.messages[: index + 1]
        last, end = self.render(alone), self.render.end_of_turn
        if end and last.endswith(self.text[slice(*self._contents[index])] + end) and gap.startswith(end):
            return content + len(end)
        calls = self.messages[index].get("tool_calls")  # whose text goes on after their arguments
        is_reply = self.messages[index]["role"] == "assistant" and not calls
        if is_reply and self.render.ends_with_next_turn and not gap.startswith(end):
            return content  # the template writes nothing after a reply, and another turn follows than a user's
        found = _content_range(last, self.render, alone, index)
        if found is not None and gap.startswith(last[found[1] :]):
            return content + len(last) - found[1]
        token = self.special.search(gap) if calls else self.special.match(gap, len(gap) - len(gap.lstrip()))
        if token is None:
            raise DataError(
                f"chat template {self.template} ends {self._named(index)} differently than the last turn and without a "
                "special token, so the end of the turn cannot be found. Use another chat_template."
            )
        return content + token.end() + len(gap[token.end() :]) - len(gap[token.end() :].lstrip())

    def _content(self, index: int) -> tuple[int, int] | None:
        if not self._looked_for_all:
            self._looked_for_all = True
            self._contents = self._all_texts()
        if index not in self._contents:
            self._contents[index] = _content_range(self.text, self.render, self.messages, index)
        return self._contents[index]

    def _all_texts(self) -> dict[int, tuple[int, int] | None]:
        """The ranges of all messages that are plain texts, from one rendering with a mark in place of each.

        Empty if the rest of that rendering is not that of the chat, such as with templates that omit thinking.
        """
        marks = {
            index: f"EBFT-{index}-MARK"
            for index, message in enumerate(self.messages)
            if message.keys() == {"role", "content"} and _is_plain(message["content"])
        }
        marked = [
            {**message, "content": marks[index]} if index in marks else message
            for index, message in enumerate(self.messages)
        ]
        try:
            parts = re.split("|".join(marks.values()) or "(?!)", self.render(marked))
        except DataError:
            return {}
        found: dict[int, tuple[int, int] | None] = {}
        at = len(parts[0])
        if len(parts) != len(marks) + 1 or not self.text.startswith(parts[0]):
            return {}
        for index, following in zip(marks, parts[1:], strict=True):
            content = self.messages[index]["content"]
            for text in (content, content.rstrip(), content.lstrip(), content.strip()):
                if self.text.startswith(text + following, at):
                    break
            else:
                return {}
            found[index] = (at, at + len(text))
            at += len(text) + len(following)
        return found if at == len(self.text) else {}

    def _named(self, index: int) -> str:
        return f"message {index} ({self.messages[index]['role']})"


def _is_plain(content: Any) -> bool:
    return isinstance(content, str) and bool(content.strip()) and not any(tag in content for tag in _THINKING)


def _only_opens_thinking(asked: str, rest: str) -> bool:
    """Whether the end `rest` of a generation prompt `asked` is no more than a thinking block, or its line break."""
    for tag in _THINKING:
        rest = rest.replace(tag, "")
    return not rest.strip() and any(tag in asked for tag in _THINKING)


def _content_range(
    text: str, render: ChatTemplate, messages: list[Message], index: int, **kwargs: Any
) -> tuple[int, int] | None:
    """Range of the content of a message (thinking, text, calls) in the rendering `text`; None if it is omitted."""
    first = _rendered_marked(render, messages, index, with_names=True, **kwargs)
    if len(set(first)) == 1:
        return None
    # The results of a call may be written with the name of the tool, so the name would hide the end of the message.
    last = first
    if messages[index].get("tool_calls"):
        last = _rendered_marked(render, messages, index, with_names=False, **kwargs)
        last = first if len(set(last)) == 1 else last
    start = len(commonprefix([text, *first]))
    end = len(text) - len(commonprefix([other[::-1] for other in (text, *last)]))
    return start, max(start, end)


def _rendered_marked(
    render: ChatTemplate, messages: list[Message], index: int, with_names: bool, **kwargs: Any
) -> list[str]:
    """The chat with each of the marks in place of the texts of a message."""
    chats = ([*messages[:index], _marked(messages[index], mark, with_names), *messages[index + 1 :]] for mark in _MARKS)
    return [render(chat, **kwargs) for chat in chats]


def _marked(message: Message, mark: str, with_names: bool) -> Message:
    changed = {
        key: mark if key not in _NAMES and (key == "content" or isinstance(value, str)) and value else value
        for key, value in message.items()
    }
    if message.get("tool_calls"):
        changed["tool_calls"] = [_marked_call(call, mark, with_names) for call in message["tool_calls"]]
    return changed


def _marked_call(call: dict[str, Any], mark: str, with_names: bool) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], mark, with_names)}
    arguments = call.get("arguments")
    new = {mark: mark} if not isinstance(arguments, str) else f'{{"{mark}": "{mark}"}}'
    return {**call, "arguments": new, **({"name": mark} if with_names else {})}


class Piece(NamedTuple):
    """A part of the rendered chat that is tokenised on its own, and the character ranges of it that are trained on."""

    text: str
    spans: list[tuple[int, int]]
    is_reply: bool  # of the assistant
    is_turn: bool = False  # that is trained on


class Part(NamedTuple):
    """A part of the rendered chat: a turn, or the text between two of them, for which `turn` is None."""

    text: str
    turn: int | None
    end: str | None = None  # of the turn; None if it is the template's


class TurnLabels(NamedTuple):
    """The turns that a dataset trains on."""

    roles: tuple[str, ...] = ("assistant",)
    eos: EOS = "turn"
    training_key: str | None = None

    def turns(self, messages: list[Message]) -> list[int]:
        """Indices of the turns to train on. An assistant's greeting at the start only counts if it is marked."""
        answers = set(replies(messages))
        return [index for index, message in enumerate(messages) if self._is_trained(message, index in answers)]

    def _is_trained(self, message: Message, is_reply: bool) -> bool:
        mark = None if self.training_key is None else message.get(self.training_key)
        if mark is None:
            role = message["role"]
            return role in self.roles and (is_reply or role != "assistant") and not is_context(message)
        if mark not in (True, False):  # 1 and 0 are equal to them
            raise DataError(f"{self.training_key!r} (message_field_training) must be true or false, got {mark!r:.60}.")
        return bool(mark)


def turn_labels(cfg: Any, entry: Any) -> TurnLabels:
    """The labels that the keys of a dataset ask for; a role can have its name in the data."""
    aliases = role_names(entry)
    roles = entry.roles_to_train
    if roles is None:
        roles = cfg.roles_to_train or ["assistant"]
    return TurnLabels(
        tuple(aliases.get(role, role) for role in roles), entry.train_on_eos or "turn", entry.message_field_training
    )


def labelled(parts: list[Part], messages: list[Message], end: str, eos: EOS, template: str) -> list[Piece]:
    """Add the trained ranges to the parts of a rendered chat.

    `end` is what the template writes after the last reply, empty if that is unknown.
    """
    if eos != "turn" and not end.strip():
        raise DataError(
            f"train_on_eos: {eos} needs a chat template that ends turns with a text of its own, and this one does not. "
            "Remove train_on_eos, or use another chat_template."
        )
    if eos == "all" and _ends_differ(parts, end):
        raise DataError(
            f"train_on_eos: all is not supported with chat template {template}, which ends the last turn differently "
            "than others. Use train_on_eos: turn, or another chat_template."
        )
    last = max((part.turn for part in parts if part.turn is not None), default=None)
    found = []
    for part in parts:
        text, turn = part.text, part.turn
        if turn is None:
            ends = [place.span() for place in re.finditer(re.escape(end), text)] if eos == "all" else []
            found.append(Piece(text, ends, is_reply=False))
        else:
            with_end = eos in ("turn", "all") or (eos == "last" and turn == last)
            is_reply = messages[turn]["role"] == "assistant"
            content = text.removesuffix(end if part.end is None else part.end)
            start = 0 if is_reply and turn > 0 else _start_of(messages[turn], content)
            span = (start, len(text if with_end else content))
            found.append(Piece(text, [span], is_reply, is_turn=True))
    return found


def _ends_differ(parts: list[Part], end: str) -> bool:
    """Whether turns end differently, and the end of the last one is not that of the turns that are not trained on."""
    varies = any(part.end not in (None, end) for part in parts)
    return varies and not any(end in part.text for part in parts if part.turn is None)


def _start_of(message: Message, text: str) -> int:
    content = message.get("content")
    start = text.rfind(content.strip()) if isinstance(content, str) else -1
    if start < 0:
        raise DataError(
            f"the chat template changes the content of a {message['role']} turn, so its tokens cannot be found. Remove "
            f"{message['role']} from roles_to_train, or use another chat_template."
        )
    return start


def turn_parts(found: Places, turns: list[int], end: str | None) -> list[Part]:
    """The rendered chat as parts that alternate between other text and `turns`.

    A reply starts after the template's generation prompt, another turn after the message before it, or with its content
    if the template renders messages differently when others follow. `end` is the template's end of turn: the ends of
    turns that end differently are also found, unless it is None.
    """
    full = found.text
    places = _prefix_places(found.render, found.messages, turns, full)
    if places is None:
        places = [found.of(index) for index in turns]
    elif end is not None:
        texts = (full[place.start : place.stop] for place in places)
        known = [text.endswith(end) for text in texts]
        places = [
            place if same else Place(place.start, max(place.start, found.of(index).ends), place.stop)
            for index, place, same in zip(turns, places, known, strict=True)
        ]
    parts: list[Part] = []
    done = 0
    for index, place in zip(turns, places, strict=True):
        if place.start < done:
            raise DataError(
                f"chat template {found.template} renders message {index} before the end of an earlier one, so turns "
                "cannot be separated. Use another chat_template."
            )
        end = None if place.ends is None else full[place.ends : place.stop]
        parts += [Part(full[done : place.start], None), Part(full[place.start : place.stop], index, end)]
        done = place.stop
    return parts


def _prefix_places(
    render: Callable[..., str], messages: list[Message], turns: list[int], full: str
) -> list[Place] | None:
    """The places of turns if the rendering of the first messages is the start of that of all, else None."""
    places = []
    for index in turns:
        is_reply = messages[index]["role"] == "assistant" and index > 0
        start = render(messages[:index], add_generation_prompt=is_reply) if index else ""
        stop = render(messages[: index + 1])
        if not (full.startswith(start) and full.startswith(stop) and stop.startswith(start)):
            return None
        places.append(Place(len(start), None, len(stop)))
    return places
