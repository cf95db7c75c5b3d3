"""Pairs of replies for reward models: `{input, chosen, rejected}` -> `{chosen_ids, rejected_ids}`.

`chat_template` renders both conversations with the tokenizer's chat template. `chosen` and `rejected` are texts, the
replies to the user message `input` after an optional `system` message; or lists of messages, whole conversations or
what follows the messages in `prompt`.
"""

from typing import Any

from jinja2 import TemplateError

from ebft.data.messages import Message, content_text, messages_of
from ebft.data.transforms.rows import encode, first_present, text_of
from ebft.errors import DataError

_FIX = "Rename the columns, or use a custom transform that returns chosen_ids and rejected_ids."


def chat_template(cfg, **kwargs):
    """Transform for pairs of replies, rendered with the chat template."""
    template = cfg.chat_template or "of the tokenizer"

    def transform_fn(example, tokenizer=None):
        if tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template. Set chat_template (chatml, llama3, or Jinja text).")
        chats = {name: _chat(example, name) for name in ("chosen", "rejected")}
        return {f"{name}_ids": _ids(tokenizer, chat, template) for name, chat in chats.items()}

    return transform_fn, {"remove_columns": "__all__"}


def _chat(example: dict[str, Any], name: str) -> list[Message]:
    """The conversation that ends with the reply `name`; empty if it is missing."""
    column = first_present(example, [name], "replies", _FIX)
    if not isinstance(example[column], list):
        reply = text_of(example, column)
        asked = text_of(example, first_present(example, ["input"], "the user message", _FIX))
        if not reply.strip() or not asked.strip():
            return []
        system = text_of(example, "system") if "system" in example else ""
        before = [{"role": "system", "content": system}] if system.strip() else []
        return [*before, {"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
    messages = messages_of(example[column], f"column {column!r}")
    if not messages:
        return []
    if messages[-1]["role"] != "assistant":
        raise DataError(f"column {column!r} must end with an assistant message, the reply that is compared.")
    if not content_text(messages[-1]).strip():
        return []
    return [*(messages_of(example["prompt"], "column 'prompt'") if "prompt" in example else []), *messages]


def _ids(tokenizer: Any, chat: list[Message], template: str) -> list[int]:
    if not chat:
        return []
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(f"chat template {template} cannot render these messages: {error}") from error
    return encode(tokenizer, text, special=False)
