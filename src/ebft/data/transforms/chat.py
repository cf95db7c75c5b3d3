"""Chats rendered with the tokenizer's chat template and split into turns that are trained on and other text."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ebft.data.chats import tools_of
from ebft.data.conversation import Renderer
from ebft.data.joined import adds_space
from ebft.data.messages import Message, replies
from ebft.data.special_tokens import special_texts
from ebft.data.thinking import thinking_spans, token_mask
from ebft.data.transforms.rows import encode, segments_row, without_labels
from ebft.data.transforms.turn_checks import TurnChecks
from ebft.data.transforms.turn_labels import Piece, TurnLabels, labelled, turn_parts
from ebft.data.transforms.turn_places import Places
from ebft.errors import DataError


def chat_transform(
    cfg: Any,
    entry: Any,
    read: Callable[[dict[str, Any]], list[Message]],
    with_reply: Callable[[Message], Message] | None = None,
    labels: TurnLabels | None = None,
) -> tuple[Callable, dict]:
    """Transform for chats; `read` returns the messages (`role`, `content`) of a row of the dataset `entry`.

    Messages after the last turn that is trained on are removed, and `prompt_length` is the start of that turn. `labels`
    are the turns to train on, in chats that may come with tools; if None, the last assistant turn, to which
    `with_reply` is applied first, as in the prompts of structured mode.
    `ebft.mask_thinking_ce` removes the labels of thinking blocks in assistant turns.
    """
    template = cfg.chat_template or "of the tokenizer"
    train_on_inputs = cfg.train_on_inputs
    mask_thinking = cfg.ebft.mask_thinking_ce
    last_reply = lambda messages: replies(messages)[-1:]
    turns_of = last_reply if labels is None else labels.turns
    eos = "turn" if labels is None else labels.eos
    known: dict[str, tuple[str, list[str]]] = {}  # the end of a turn and the special tokens, by template
    checks = TurnChecks(template, with_ends=eos != "none")

    def transform_fn(example, tokenizer=None):
        if tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template. Set chat_template (chatml, llama3, or Jinja text).")
        messages = read(example)
        if not messages:
            return segments_row([([], False)], False)
        turns = turns_of(messages)
        if labels is not None:
            # The model does not learn to say nothing.
            turns = [turn for turn in turns if _says(messages[turn]) or messages[turn].get("tool_calls")]
        last = messages[turns[-1]] if turns else None
        last = with_reply(last) if last is not None and with_reply is not None else last
        asked, messages = messages, _up_to(messages, turns, last, with_calls=labels is not None)
        if not messages:
            # The filter counts this as a row without a reference; templates may fail to render such a chat.
            text = "\n".join(str(message.get("content", "")) for message in asked)
            return segments_row([(encode(tokenizer, text, special=False), False), ([], True)], False)
        if tokenizer.chat_template not in known:
            known[tokenizer.chat_template] = Renderer(tokenizer).end_of_turn, special_texts(tokenizer)
        tools = None if labels is None else tools_of(example, entry)
        render = partial(_render, tokenizer, template=template, tools=tools)
        end, special = known[tokenizer.chat_template]
        messages = checks.omissions.with_known_roles(messages, render, tokenizer.chat_template)
        found = Places(render, messages, special, template)
        checks.omissions.check(messages, render, turns, found.text)
        parts = turn_parts(found, turns, end if eos in ("last", "none") else None)
        checks.check(found, parts, tools, partial(_render, tokenizer, template=template, tools=None))
        pieces = labelled(parts, messages, end, eos, template)
        return _row(tokenizer, pieces, train_on_inputs, mask_thinking)

    return transform_fn, {"remove_columns": "__all__"}


def _says(message: Message) -> bool:
    return bool(str(message.get("content") or "").strip())


def _up_to(messages: list[Message], turns: list[int], last: Message | None, with_calls: bool) -> list[Message]:
    """The messages up to the last turn that is trained on, empty if there is none or it has no text.

    A turn that only calls tools counts if `with_calls`; it cannot be compared with a reference.
    """
    if last is None or not (_says(last) or (with_calls and last.get("tool_calls"))):
        return []
    return [*messages[: turns[-1]], last]


def _row(
    tokenizer: PreTrainedTokenizerBase, pieces: list[Piece], train_on_inputs: bool, mask_thinking: bool
) -> dict[str, Any]:
    """The fields of a row; a piece that is trained on in part is labelled token by token."""
    if adds_space(tokenizer):
        return _row_of_whole(tokenizer, pieces, train_on_inputs, mask_thinking)
    segments = [(encode(tokenizer, piece.text, special=False), bool(piece.spans)) for piece in pieces]
    row = segments_row(segments, train_on_inputs)
    masked: list[bool] = []
    for piece, (ids, _) in zip(pieces, segments):
        off = [False] * len(ids)
        if not train_on_inputs and piece.spans not in ([], [(0, len(piece.text))]):
            off = [not learned for learned in token_mask(tokenizer, piece.text, piece.spans)]
        if mask_thinking and piece.is_reply:
            thought = token_mask(tokenizer, piece.text, thinking_spans(piece.text))
            off = [left or right for left, right in zip(off, thought, strict=True)]
        masked += off
    return without_labels(row, masked) if any(masked) else row


def _row_of_whole(
    tokenizer: PreTrainedTokenizerBase, pieces: list[Piece], train_on_inputs: bool, mask_thinking: bool
) -> dict[str, Any]:
    """The fields of a row whose text is tokenised at once, for tokenizers that add a space to each text.

    A token is trained on if any of its characters is, so one at the start of a turn is part of the turn.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} adds a space to the start of texts and does not support offset mapping, so "
            "the tokens of turns cannot be found. Use a fast tokenizer (one with a tokenizer.json)."
        )
    text = "".join(piece.text for piece in pieces)
    learned, thoughts, done = [], [], 0
    for piece in pieces:
        learned += [(done + first, done + last) for first, last in piece.spans]
        found = thinking_spans(piece.text) if mask_thinking and piece.is_reply else []
        thoughts += [(done + first, done + last) for first, last in found]
        done += len(piece.text)
    reply = token_mask(tokenizer, text, [(len(text) - len(pieces[-1].text), len(text))])
    first = reply.index(True) if True in reply else len(reply)
    ids = encode(tokenizer, text, special=False)
    off = [False] * len(ids) if train_on_inputs else [not on for on in token_mask(tokenizer, text, learned)]
    if thoughts:
        off = [left or right for left, right in zip(off, token_mask(tokenizer, text, thoughts), strict=True)]
    return without_labels(segments_row([(ids[:first], True), (ids[first:], True)], True), off)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template: str,
    tools: list[Any] | None,
    add_generation_prompt: bool = False,
) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(f"chat template {template} cannot render these messages: {error}") from error
