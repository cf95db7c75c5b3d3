"""Chats for SFT: `{messages}` -> `{input_ids, labels, prompt_length}`, with every assistant turn as labels.

Keys of the dataset select other turns and ends of turns for SFT. In strided mode only the last assistant turn is
sampled and trained on.
"""

from functools import partial

from ebft.data.chats import chat_of
from ebft.data.transforms.chat import chat_transform
from ebft.data.transforms.turn_labels import TurnLabels, turn_labels


def transform(cfg, dataset, **kwargs):
    """Transform for chats; all assistant turns are trained on, or those that the dataset selects."""
    is_sft = cfg.required_rows.block is None
    labels = turn_labels(cfg, dataset) if is_sft else TurnLabels()
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset), labels=labels)
