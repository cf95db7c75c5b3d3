"""Which turns of a chat SFT trains on, and which characters of the rendered text: contents and ends of turns.

The end of a turn is all that the chat template writes after its content, such as `<|im_end|>` and a line break.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ebft.config.shapes import EOS
from ebft.data.chats import role_names
from ebft.data.messages import Message, replies
from ebft.errors import DataError

_PLACEHOLDER = "EBFT-TURN-EBFT"  # content whose place in the rendered chat shows that of a turn


class Piece(NamedTuple):
    """A part of the rendered chat that is tokenised on its own, and the character ranges of it that are trained on."""

    text: str
    spans: list[tuple[int, int]]
    is_reply: bool  # of the assistant


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
            return role in self.roles and (is_reply or role != "assistant")
        if mark not in (True, False):  # 1 and 0 are equal to them
            raise DataError(f"{self.training_key!r} (message_field_training) must be true or false, got {mark!r:.60}.")
        return bool(mark)


def turn_labels(cfg: Any, entry: Any) -> TurnLabels:
    """The labels that the keys of a dataset ask for; a role can have its name in the data."""
    aliases = role_names(entry)
    roles = entry.roles_to_train or cfg.roles_to_train or ["assistant"]
    return TurnLabels(
        tuple(aliases.get(role, role) for role in roles), entry.train_on_eos or "turn", entry.message_field_training
    )


def labelled(pieces: list[tuple[str, int | None]], messages: list[Message], end: str, eos: EOS) -> list[Piece]:
    """Add the trained ranges to pieces of text, each with the index of its turn or None for text between turns.

    `end` is what the template writes after a reply, empty if that is unknown.
    """
    if eos != "turn" and not end.strip():
        raise DataError(
            f"train_on_eos: {eos} needs a chat template that ends turns with a text of its own, and this one does not. "
            "Remove train_on_eos, or use another chat_template."
        )
    last = max((turn for _, turn in pieces if turn is not None), default=None)
    found = []
    for text, turn in pieces:
        if turn is None:
            found.append(Piece(text, _ends(text, end) if eos == "all" else [], is_reply=False))
        else:
            with_end = eos in ("turn", "all") or (eos == "last" and turn == last)
            is_reply = messages[turn]["role"] == "assistant"
            start_of = (lambda _: 0) if is_reply and turn > 0 else partial(_start_of, messages[turn])
            found.append(Piece(text, [_content(text, start_of, end, with_end)], is_reply))
    return found


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


def turn_pieces(
    render: Callable[..., str], messages: list[Message], turns: list[int], template: str, end: str
) -> list[tuple[str, int | None]]:
    """The rendered chat as texts that alternate between other text and `turns`, each with its turn or None.

    A reply starts after the template's generation prompt, another turn after the message before it. Some templates
    render earlier messages differently once others follow, for example without their thinking: a turn then is its
    content and the text `end` that the template writes after a reply.
    """
    full = render(messages)
    pieces: list[tuple[str, int | None]] = []
    done = 0
    for index in turns:
        found = _after_start(render, messages, index, full) or _around_content(render, messages, index, full, end)
        if found is None or found[0] < done:
            raise DataError(
                f"chat template {template} renders the messages before an assistant turn differently than in the "
                "whole chat, so the prompt cannot be separated from the reply. Use another chat_template."
            )
        start, stop = found
        pieces += [(full[done:start], None), (full[start:stop], index)]
        done = stop
    return pieces


def _after_start(render: Callable[..., str], messages: list[Message], index: int, full: str) -> tuple[int, int] | None:
    """The range of a turn, if the chat up to its start and the one up to its end are prefixes of the whole chat."""
    is_reply = messages[index]["role"] == "assistant" and index > 0
    start = render(messages[:index], add_generation_prompt=is_reply) if index else ""
    end = render(messages[: index + 1])
    if full.startswith(start) and full.startswith(end) and end.startswith(start):
        return len(start), len(end)
    return None


def _around_content(
    render: Callable[..., str], messages: list[Message], index: int, full: str, end: str
) -> tuple[int, int] | None:
    """The range of a turn's content and `end`, from the chat with another content in its place.

    Spaces before a reply's content belong to it, unless the generation prompt has them.
    """
    if not end or index == len(messages) - 1 or not isinstance(messages[index].get("content"), str):
        return None  # a model that answers the last turn must be given the chat before it as it is rendered here
    other = _PLACEHOLDER
    while any(other in str(message) for message in messages):
        other += "-EBFT"
    text = render([*messages[:index], {**messages[index], "content": other}, *messages[index + 1 :]])
    before, _, after = text.partition(other)
    fits = len(before) + len(after) <= len(full) and full.startswith(before) and full.endswith(after)
    if other not in text or not fits or not after.startswith(end):
        return None
    start = len(before)
    if messages[index]["role"] == "assistant" and not render(messages[:index], add_generation_prompt=True).endswith(
        " "
    ):
        start = len(before.rstrip(" "))
    return start, len(full) - len(after) + len(end)
