"""Which turns of a chat SFT trains on, and which characters of the rendered text: contents and ends of turns.

The end of a turn is all that the chat template writes after its content, such as `<|im_end|>` and a line break.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ebft.config.shapes import EOS
from ebft.data.chats import role_names
from ebft.data.messages import Message, is_context, replies
from ebft.data.transforms.turn_places import Place, Places
from ebft.errors import DataError


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
            found.append(Piece(text, _ends(text, end) if eos == "all" else [], is_reply=False))
        else:
            with_end = eos in ("turn", "all") or (eos == "last" and turn == last)
            is_reply = messages[turn]["role"] == "assistant"
            start_of = (lambda _: 0) if is_reply and turn > 0 else partial(_start_of, messages[turn])
            own_end = end if part.end is None else part.end
            found.append(Piece(text, [_content(text, start_of, own_end, with_end)], is_reply, is_turn=True))
    return found


def _ends_differ(parts: list[Part], end: str) -> bool:
    """Whether turns end differently, and the end of the last one is not that of the turns that are not trained on."""
    varies = any(part.end not in (None, end) for part in parts)
    return varies and not any(end in part.text for part in parts if part.turn is None)


def _content(text: str, start_of: Callable[[str], int], end: str, with_end: bool) -> tuple[int, int]:
    """The range of a turn to train on; `start_of` finds its start in the text without the end of the turn."""
    stop = len(text) - len(end) if end and text.endswith(end) else len(text)
    return start_of(text[:stop]), len(text) if with_end else stop


def _start_of(message: Message, text: str) -> int:
    content = message.get("content")
    start = text.rfind(content.strip()) if isinstance(content, str) else -1
    if start < 0:
        raise DataError(
            f"the chat template changes the content of a {message['role']} turn, so its tokens cannot be found. Remove "
            f"{message['role']} from roles_to_train, or use another chat_template."
        )
    return start


def _ends(text: str, end: str) -> list[tuple[int, int]]:
    found, start = [], text.find(end)
    while start >= 0:
        found.append((start, start + len(end)))
        start = text.find(end, start + len(end))
    return found


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
