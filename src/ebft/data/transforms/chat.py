"""Chats rendered with the tokenizer's chat template and split into turns that are trained on and other text."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.chats import tools_of
from ebft.data.messages import Message, replies
from ebft.data.rendering import ChatTemplate, row_kwargs
from ebft.data.tokens import Tokens, thinking_spans
from ebft.data.transforms.labels import Piece, Places, TurnChecks, TurnLabels, labelled, turn_parts
from ebft.data.transforms.rows import encode, segments_row, without_labels
from ebft.errors import DataError


def chat_transform(
    cfg: Any,
    entry: Any,
    read: Callable[[dict[str, Any]], list[Message]],
    with_reply: Callable[[Message, PreTrainedTokenizerBase], Message] | None = None,
    labels: TurnLabels | None = None,
) -> tuple[Callable, dict]:
    """Transform for chats; `read` returns the messages (`role`, `content`) of a row of the dataset `entry`.

    Messages after the last turn that is trained on are removed, and `prompt_length` is the start of that turn.
    `turn_spans` are the token ranges of all turns that are trained on, without ends of turns that are not. `labels`
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
    known: dict[str, ChatTemplate] = {}  # by the text of the template
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
        last = with_reply(last, tokenizer) if last is not None and with_reply is not None else last
        asked, messages = messages, _up_to(messages, turns, last, with_calls=labels is not None)
        if not messages:
            # The filter counts this as a row without a reference; templates may fail to render such a chat.
            text = "\n".join(str(message.get("content", "")) for message in asked)
            return segments_row([(encode(tokenizer, text, special=False), False), ([], True)], False)
        if tokenizer.chat_template not in known:
            known[tokenizer.chat_template] = ChatTemplate(tokenizer, template, cfg.chat_template_kwargs)
        kwargs = row_kwargs(example, entry.chat_template_kwargs)
        render = known[tokenizer.chat_template].with_tools(tools_of(example, entry), kwargs)
        end = render.end_of_turn
        messages = checks.omissions.with_known_roles(messages, render)
        found = Places(render, messages)
        checks.omissions.check(messages, render, turns, found.text)
        parts = turn_parts(found, turns, end if eos in ("last", "none") else None)
        checks.check(found, parts)
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
    """The fields of a row. A token is trained on if any of its characters is."""
    tokens = Tokens(tokenizer, "".join(piece.text for piece in pieces))
    learned, turns, thoughts, done = [], [], [], 0
    for piece in pieces:
        learned += [(done + first, done + last) for first, last in piece.spans]
        turns += [(done + first, done + last) for first, last in piece.spans if piece.is_turn and first < last]
        found = thinking_spans(piece.text) if mask_thinking and piece.is_reply else []
        thoughts += [(done + first, done + last) for first, last in found]
        done += len(piece.text)
    prompt_length = tokens.before(done - len(pieces[-1].text))
    ids = tokens.ids
    off = [False] * len(ids) if train_on_inputs else [not on for on in tokens.mask(learned)]
    if thoughts:
        off = [left or right for left, right in zip(off, tokens.mask(thoughts), strict=True)]
    row = without_labels(segments_row([(ids[:prompt_length], True), (ids[prompt_length:], True)], True), off)
    return {**row, "turn_spans": tokens.ranges_of(turns)}
