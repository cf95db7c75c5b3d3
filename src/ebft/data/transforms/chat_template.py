"""Chats for SFT: `{messages}` -> `{input_ids, labels, prompt_length}`, with every assistant turn as labels."""

from functools import partial

from ebft.data.messages import chat_of
from ebft.data.transforms.chat import chat_transform


def transform(cfg, dataset, **kwargs):
    """Transform for chats; all assistant turns are trained on."""
    return chat_transform(cfg, partial(chat_of, field=dataset.field), last_turn_only=False)
