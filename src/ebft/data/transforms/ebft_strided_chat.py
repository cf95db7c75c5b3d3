"""Chats for strided mode: `{messages}` -> `{input_ids, labels, prompt_length}`, with the last assistant turn as labels.

The prompt is everything before the last assistant turn, with the chat template's generation prompt.
`ebft.mask_thinking_ce` removes the labels of thinking blocks in that turn.
"""

from functools import partial

from ebft.data.chats import chat_of
from ebft.data.transforms.chat import chat_transform


def transform(cfg, dataset, **kwargs):
    """Transform for chats; the reference is the last assistant turn."""
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset))
