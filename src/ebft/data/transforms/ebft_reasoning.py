"""Chats whose replies contain thinking, in tags (`ebft.data.thinking`) or as `reasoning_content` next to the content.

`{messages}` -> `{prompt, ground_truth}`, with the last assistant turn as the reference: complete, only its answer, or
with the thinking of earlier turns separated. `transform_strided` returns `{input_ids, labels, prompt_length}` for
strided mode.
"""

from functools import partial
from typing import Any

from ebft.data.chats import chat_of, reply_column, template_columns
from ebft.data.messages import Message, before_last_answer, content_text
from ebft.data.rendering import ChatTemplate
from ebft.data.thinking import THINKING, split_thinking, with_thinking
from ebft.data.transforms.chat import chat_transform


def transform(cfg, dataset, **kwargs):
    """Transform for references including their thinking."""
    return _transform(dataset, _rendered)


def transform_answer_only(cfg, dataset, **kwargs):
    """Transform for references without their thinking."""
    return _transform(
        dataset, lambda reply, _: {"role": "assistant", "content": split_thinking(content_text(reply))[1]}
    )


def transform_split_thinking(cfg, dataset, **kwargs):
    """Transform that passes the thinking of earlier turns to the chat template separately, which may render or omit it.

    The reference keeps its thinking, in `<think>` tags regardless of its original tags.
    """
    return _transform(dataset, lambda reply, tokenizer: _rendered(_apart(reply), tokenizer), in_prompt=_apart)


def transform_strided(cfg, dataset, **kwargs):
    """Transform for strided mode, as `ebft_strided_chat` with the thinking in the last turn."""
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset), with_reply=_rendered)


def _transform(dataset, reference, in_prompt=None):
    def transform_fn(example, tokenizer=None):
        prompt, reply = before_last_answer(chat_of(example, dataset))
        if in_prompt is not None:
            prompt = [in_prompt(message) if message["role"] == "assistant" else message for message in prompt]
        row = {"prompt": prompt, "ground_truth": None, **template_columns(example, dataset)}
        if reply is None:
            return row
        reply = reference(reply, tokenizer)
        return {**row, "ground_truth": with_thinking(reply)["content"], **reply_column(reply)}

    return transform_fn, {"remove_columns": "__all__"}


def _rendered(reply: Message, tokenizer: Any) -> Message:
    """The reply with its thinking where the chat template renders it: in a key of its own, or else in the content."""
    has_key = any(reply.get(key) for key in THINKING)
    return reply if has_key and ChatTemplate(tokenizer).thinking_key else with_thinking(reply)


def _apart(reply: Message) -> Message:
    """The reply with its thinking in `reasoning_content` and only the answer in the content."""
    thinking, answer = split_thinking(content_text(reply))
    return {**reply, "content": answer, **({"reasoning_content": thinking} if thinking else {})}
