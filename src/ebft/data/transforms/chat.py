"""Chats rendered with the tokenizer's chat template and split into assistant turns and other text."""

from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ebft.data.messages import Message, replies
from ebft.data.thinking import thinking_spans, token_mask
from ebft.data.transforms.rows import encode, segments_row, without_labels
from ebft.errors import DataError


def chat_transform(
    cfg: Any,
    read: Callable[[dict[str, Any]], list[Message]],
    last_turn_only: bool,
    with_reply: Callable[[Message], Message] | None = None,
) -> tuple[Callable, dict]:
    """Transform for chats; `read` returns the messages (`role`, `content`) of a row.

    Messages after the last assistant turn are removed, and `prompt_length` is the start of that turn. Labels are the
    assistant turns, or only the last one, to which `with_reply` is applied first; `ebft.mask_thinking_ce` removes the
    labels of their thinking blocks.
    """
    template = cfg.chat_template or "of the tokenizer"
    train_on_inputs = cfg.train_on_inputs
    mask_thinking = cfg.ebft.mask_thinking_ce

    def transform_fn(example, tokenizer=None):
        if tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template. Set chat_template (chatml, llama3, or Jinja text).")
        messages = read(example)
        if not messages:
            return segments_row([([], False)], False)
        asked = messages
        messages = _up_to_last_reply(messages, with_reply)
        if not messages:
            # The filter counts this as a row without a reference; templates may fail to render such a chat.
            text = "\n".join(str(message.get("content", "")) for message in asked)
            return segments_row([(encode(tokenizer, text, special=False), False), ([], True)], False)
        texts = _segments(tokenizer, messages, last_turn_only, template)
        segments = [(encode(tokenizer, text, special=False), trained) for text, trained in texts]
        row = segments_row(segments, train_on_inputs)
        if not mask_thinking:
            return row
        thought = [
            token_mask(tokenizer, text, thinking_spans(text)) if trained else [False] * len(ids)
            for (text, trained), (ids, _) in zip(texts, segments)
        ]
        return without_labels(row, [masked for segment in thought for masked in segment])

    return transform_fn, {"remove_columns": "__all__"}


def _up_to_last_reply(messages: list[Message], with_reply: Callable[[Message], Message] | None) -> list[Message]:
    """The messages up to the last assistant turn, empty if there is none or it has no text."""
    turns = replies(messages)
    if not turns:
        return []
    reply = messages[turns[-1]] if with_reply is None else with_reply(messages[turns[-1]])
    if not str(reply.get("content", "")).strip():
        return []
    return [*messages[: turns[-1]], reply]


def _segments(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], last_turn_only: bool, template: str
) -> list[tuple[str, bool]]:
    """The rendered chat as pieces (text, trained on) that alternate between other turns and assistant turns."""
    full = _render(tokenizer, messages, template)
    pieces, done = [], 0
    for index in replies(messages)[-1:] if last_turn_only else replies(messages):
        start = _render(tokenizer, messages[:index], template, add_generation_prompt=True)
        end = _render(tokenizer, messages[: index + 1], template)
        if not (full.startswith(start) and full.startswith(end) and end.startswith(start)):
            raise DataError(
                f"chat template {template} renders the messages before an assistant turn differently than in the "
                "whole chat, so the prompt cannot be separated from the reply. Use another chat_template."
            )
        pieces += [(full[done : len(start)], False), (full[len(start) : len(end)], True)]
        done = len(end)
    return pieces


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], template: str, add_generation_prompt: bool = False
) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(f"chat template {template} cannot render these messages: {error}") from error
