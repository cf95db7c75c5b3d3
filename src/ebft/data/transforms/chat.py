"""Chats through the tokenizer's chat template, cut where the assistant's turns begin and end."""

from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ebft.data.transforms.rows import encode, first_present, segments_row
from ebft.errors import DataError

_SHAPE = "Chats of from and value (ShareGPT's conversations) must be turned into messages of role and content first."


def chat_transform(cfg: Any, dataset: Any, last_turn_only: bool) -> tuple[Callable, dict]:
    """Transform for a column of messages (`role`, `content`): the entry's `field`, else `messages`.

    What follows the last assistant turn is left out, `prompt_length` is where that turn begins. Trained on are
    the assistant's turns, or the last one only.
    """
    columns = [dataset.field] if dataset.field else ["messages"]
    template = cfg.chat_template or "the tokenizer's own"
    train_on_inputs = cfg.train_on_inputs

    def transform_fn(example, tokenizer=None):
        if tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template. Set chat_template (chatml, llama3, or your own Jinja text)."
            )
        column = first_present(example, columns, "messages", f"Name it with the entry's `field`. {_SHAPE}")
        messages = _messages(example[column], column)
        if not messages:
            return segments_row([([], False)], False)
        asked = messages
        messages = _up_to_last_reply(messages)
        if not messages:
            # The filter counts it as a row without a reference; templates may refuse to render such a chat.
            text = "\n".join(str(message.get("content", "")) for message in asked)
            return segments_row([(encode(tokenizer, text, special=False), False), ([], True)], False)
        texts = _segments(tokenizer, messages, last_turn_only, template)
        segments = [(encode(tokenizer, text, special=False), trained) for text, trained in texts]
        return segments_row(segments, train_on_inputs)

    return transform_fn, {"remove_columns": "__all__"}


def _messages(messages: Any, column: str) -> list[dict]:
    """The chat in a column, empty for a missing one; DataError when it holds something else."""
    if messages is None:
        return []
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message and "content" in message for message in messages
    ):
        raise DataError(f"column {column!r} must hold a list of messages with the keys role and content. {_SHAPE}")
    # Arrow gives every message the keys of all messages, None where it has none; templates test for presence.
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _up_to_last_reply(messages: list[dict]) -> list[dict]:
    """The messages up to the last assistant turn, empty where there is none or it says nothing."""
    replies = _replies(messages)
    if not replies or not str(messages[replies[-1]].get("content", "")).strip():
        return []
    return messages[: replies[-1] + 1]


def _replies(messages: list[dict]) -> list[int]:
    """Positions of the assistant's turns that answer something; a chat's opening greeting does not."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]


def _segments(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], last_turn_only: bool, template: str
) -> list[tuple[str, bool]]:
    """The rendered chat in pieces of (text, trained on) that alternate between the others and the assistant."""
    full = _render(tokenizer, messages, template)
    pieces, done = [], 0
    for index in _replies(messages)[-1:] if last_turn_only else _replies(messages):
        start = _render(tokenizer, messages[:index], template, add_generation_prompt=True)
        end = _render(tokenizer, messages[: index + 1], template)
        if not (full.startswith(start) and full.startswith(end) and end.startswith(start)):
            raise DataError(
                f"chat template {template} renders the messages before an assistant turn otherwise than in the "
                "whole chat, so the prompt cannot be told from the reply. Use another chat_template."
            )
        pieces += [(full[done : len(start)], False), (full[len(start) : len(end)], True)]
        done = len(end)
    return pieces


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], template: str, add_generation_prompt: bool = False
) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(f"chat template {template} cannot render these messages: {error}") from error
