"""Where turns are in a rendered chat, and the turns that a dataset trains on.

Turns end where the rendering of the messages up to them ends. A template may render a message differently if other
messages follow it: it omits the thinking of earlier turns, or writes another end after the last one. The rendering of
the first messages is then not the start of the whole one, and a training template of TRL renders another text. There, a
message is found by changing its text: the rendering is the same before and after it.
"""

import re
from functools import cached_property
from os.path import commonprefix
from typing import Any, NamedTuple, NoReturn

from ebft.config.section import EOS
from ebft.data.messages import Message, is_context, replies, role_names
from ebft.data.rendering import ChatTemplate
from ebft.data.tokens import TAG
from ebft.errors import DataError

# Two texts without a common start or end, so that what they share with the rendering is outside of the message.
_MARKS = ("AEBFT-MARK-A", "ZEBFT-MARK-Z")
_NAMES = ("role", "name", "id", "tool_call_id")  # texts of a message that are not its contents


class Place(NamedTuple):
    """Character range of a turn in the rendered chat, and where its end begins."""

    start: int
    ends: int
    stop: int


class Places:
    """Finds turns in the rendering of a whole chat by a chat template."""

    def __init__(self, render: ChatTemplate, messages: list[Message]) -> None:
        self.render, self.messages, self.template = render, messages, render.name
        self.text = render(messages)
        self.special = re.compile("|".join(re.escape(token) for token in render.special if token) or "(?!)")

    def turns(self, indices: list[int]) -> list[Place]:
        """The turns `indices`, in order. Raises DataError if one starts before the end of an earlier one."""
        places, done = [self._known(index) for index in indices], 0
        for index, place in zip(indices, places, strict=True):
            if place.start < done:
                self._refuse(f"renders message {index} before the end of an earlier one")
            done = place.stop
        return places

    def _known(self, index: int) -> Place:
        """The turn `index`. Between the same texts, a turn of the same roles has the same place around its content. So
        the time of a chat of plain texts is linear in its turns: each other way renders the chat up to the turn."""
        around = [self._contents.get(number) for number in (index - 1, index, index + 1)]
        is_last = index + 1 == len(self.messages)
        if None in around[:2] or (around[2] is None and not is_last):
            return self._by_prefix(index) or self.of(index)
        (_, before), (start, stop), (after, _) = *around[:2], around[2] or (len(self.text), 0)
        roles = (message["role"] for message in self.messages[index - 1 : index + 2])
        key = (*roles, self.text[before:start], self.text[stop:after])
        if key not in self.render.places:
            found = self._by_prefix(index) or self.of(index)
            self.render.places[key] = (found.start - start, found.ends - stop, found.stop - stop)
        first, ends, last = self.render.places[key]
        return Place(start + first, stop + ends, stop + last)

    def _by_prefix(self, index: int) -> Place | None:
        """The turn `index`, if the renderings up to it are the starts of the whole one, else None."""
        is_reply, end = self.messages[index]["role"] == "assistant" and index > 0, self.render.end_of_turn
        try:
            asked = self.render(self.messages[:index], add_generation_prompt=is_reply) if index else ""
            answered = self.render(self.messages[: index + 1])
        except DataError:  # such as of a template that refuses a system message alone
            return None
        if not (self.text.startswith(answered) and answered.startswith(asked)):
            return None
        start, stop = len(asked), len(answered)
        if not is_reply:
            start = self.of(index).start
            start += len(self.text[start:stop]) - len(self.text[start:stop].lstrip())
        if end and self.text[start:stop].endswith(end):
            return Place(start, stop - len(end), stop)
        return Place(start, min(stop, max(start, self.of(index).ends)), stop)

    def of(self, index: int) -> Place:
        """The turn `index`: a reply from the end of its header, another turn from its content, with what ends it."""
        content, calls = self._content(index), self.messages[index].get("tool_calls")
        if content is None:
            self._refuse(f"omits the {'tool calls' if calls else 'content'} of {self._named(index)}")
        is_reply = self.messages[index]["role"] == "assistant" and index > 0
        start = self._reply_start(index, content[0]) if is_reply else content[0]
        stop, end = self._stop(index, content[1]), self.render.end_of_turn
        if end and self.text[start:stop].endswith(end):
            return Place(start, stop - len(end), stop)
        if not calls:
            return Place(start, content[1], stop)
        found = self.special.search(self.text, content[1], stop)  # the text of calls goes on after their arguments
        return Place(start, found.start() if found else stop, stop)

    def _reply_start(self, index: int, content: int) -> int:
        """The end of the generation prompt, as far as it is in the chat."""
        before = self.messages[:index]
        asked = self.render(before, add_generation_prompt=True)
        done, done_asked = self._last_content_end(index, asked, before)
        header, header_asked = self.text[done:content], asked[done_asked:]
        if content < done:
            self._refuse(f"renders earlier messages depending on the content of {self._named(index)}")
        common = commonprefix([header, header_asked])
        rest, rest_asked = header[len(common) :], header_asked[len(common) :]
        if rest and rest_asked:
            common = re.sub(r"[<|/\w]+$", "", common)
            # Such as a block that the generation prompt opens and the reply closes; its tags can be special tokens.
            differs = any(self.special.search(text[len(common.rstrip()) :]) for text in (header, header_asked))
            opens = TAG.search(header_asked) and not TAG.sub("", header_asked[len(common.rstrip()) :]).strip()
            if not common.strip() or (differs and not opens):
                self._refuse(f"writes another text before {self._named(index)} than before a new reply")
        # White space that goes on in one of the two is another token there.
        goes_on = any(text[len(common) :][:1].isspace() for text in (header, header_asked))
        if rest_asked and goes_on and (rest or not self.text[content:].startswith("\n")):
            common = common.rstrip()
        return done + len(common)

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
        if is_reply and self.render.next_turn[False] and not gap.startswith(end):
            return content  # the template writes nothing after a reply, and another turn follows than a user's
        found = _content_range(last, self.render, alone, index)
        if found is not None and gap.startswith(last[found[1] :]):
            return content + len(last) - found[1]
        token = self.special.search(gap) if calls else self.special.match(gap, len(gap) - len(gap.lstrip()))
        if token is None:
            self._refuse(f"ends {self._named(index)} differently than the last turn and without a special token")
        return content + token.end() + len(gap[token.end() :]) - len(gap[token.end() :].lstrip())

    def _content(self, index: int) -> tuple[int, int] | None:
        if index not in self._contents:
            self._contents[index] = _content_range(self.text, self.render, self.messages, index)
        return self._contents[index]

    @cached_property
    def _contents(self) -> dict[int, tuple[int, int] | None]:
        """The ranges of all messages that are plain texts, from one rendering with a mark in place of each. Empty if
        the rest of that rendering differs from the chat, such as with templates that omit thinking. One rendering
        instead of two for each message: a chat of 100 messages takes a tenth of the time."""
        marks, marked = {}, list(self.messages)
        for index, message in enumerate(self.messages):
            content = message.get("content")
            is_text = message.keys() == {"role", "content"} and isinstance(content, str) and content.strip()
            if is_text and not TAG.search(content):
                marks[index] = f"EBFT-{index}-MARK"
                marked[index] = {**message, "content": marks[index]}
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

    def _refuse(self, problem: str) -> NoReturn:
        raise DataError(
            f"chat template {self.template} {problem}, so turns cannot be separated. Use another chat_template, or "
            "leave a role that is not assistant out of roles_to_train."
        )

    def _named(self, index: int) -> str:
        return f"message {index} ({self.messages[index]['role']})"


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
    found = []
    for mark in _MARKS:
        changed = {
            key: mark if key not in _NAMES and (key == "content" or isinstance(value, str)) and value else value
            for key, value in messages[index].items()
        }
        if changed.get("tool_calls"):
            changed["tool_calls"] = [_marked_call(call, mark, with_names) for call in changed["tool_calls"]]
        found.append(render([*messages[:index], changed, *messages[index + 1 :]], **kwargs))
    return found


def _marked_call(call: dict[str, Any], mark: str, with_names: bool) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], mark, with_names)}
    arguments = call.get("arguments")
    new = {mark: mark} if not isinstance(arguments, str) else f'{{"{mark}": "{mark}"}}'
    return {**call, "arguments": new, **({"name": mark} if with_names else {})}


class TurnLabels(NamedTuple):
    """The turns that a dataset trains on."""

    roles: tuple[str, ...] = ("assistant",)
    eos: EOS = "turn"
    training_key: str | None = None

    def turns(self, messages: list[Message]) -> list[int]:
        """Indices of the turns to train on. An assistant's greeting at the start only counts if it is marked."""
        answers, found = set(replies(messages)), []
        for index, message in enumerate(messages):
            mark, role = None if self.training_key is None else message.get(self.training_key), message["role"]
            if mark is None:
                mark = role in self.roles and (index in answers or role != "assistant") and not is_context(message)
            elif mark not in (True, False):  # 1 and 0 are equal to them
                key = f"{self.training_key!r} (message_field_training)"
                raise DataError(f"{key} must be true or false, got {mark!r:.60}.")
            found += [index] if mark else []
        return found


def turn_labels(cfg: Any, entry: Any) -> TurnLabels:
    """The labels that the keys of a dataset ask for; a role can have its name in the data."""
    given, aliases = entry.roles_to_train, role_names(entry)
    given = (cfg.roles_to_train or ["assistant"]) if given is None else given
    roles = tuple(aliases.get(role, role) for role in given)
    return TurnLabels(roles, entry.train_on_eos or "turn", entry.message_field_training)


def trained_ranges(found: Places, places: list[Place], eos: EOS) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The character ranges of the turns at `places` that are trained on, and of the ends of others, with `eos: all`."""
    end, last = found.render.end_of_turn, len(places) - 1
    if eos != "turn" and not end.strip():
        raise DataError(
            f"train_on_eos: {eos} needs a chat template that ends turns with a text of its own, and this one does not. "
            "Remove train_on_eos, or use another chat_template."
        )
    with_end = lambda number: eos in ("turn", "all") or (eos == "last" and number == last)
    turns = [(place.start, place.stop if with_end(n) else place.ends) for n, place in enumerate(places)]
    if eos != "all":
        return turns, []
    starts = [0, *(place.stop for place in places)]
    gaps = zip(starts, (place.start for place in places))
    ends = [m.span() for start, stop in gaps for m in re.compile(re.escape(end)).finditer(found.text, start, stop)]
    if not ends and any(found.text[place.ends : place.stop] != end for place in places):
        raise DataError(
            f"train_on_eos: all is not supported with chat template {found.template}, which ends the last turn "
            "differently than others. Use train_on_eos: turn, or another chat_template."
        )
    return turns, ends
