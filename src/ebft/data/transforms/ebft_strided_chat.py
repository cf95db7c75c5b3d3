"""Chats for strided mode and SFT: `{messages}` -> `{input_ids, labels, prompt_length, turn_spans}`.

`transform` trains on every assistant turn, or on the turns that keys of the dataset select, in one row;
`transform_last_turn` on the last assistant turn; `transform_all_turns` makes one row per answer, each with its full
history. `ebft.mask_thinking_ce` removes the labels of thinking blocks in these turns.
"""

from functools import partial

from ebft.data.chats import chat_of
from ebft.data.messages import answers
from ebft.data.transforms.chat import chat_transform
from ebft.data.transforms.turn_labels import turn_labels


def transform(cfg, dataset, **kwargs):
    """Transform for chats; the references are all assistant turns, or those that the dataset selects."""
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset), labels=turn_labels(cfg, dataset))


def transform_last_turn(cfg, dataset, **kwargs):
    """Transform for chats; the reference is the last assistant turn."""
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset))


def transform_all_turns(cfg, dataset, **kwargs):
    """Transform for chats in which every answer is a reference, with one row each."""
    row_of, _ = chat_transform(cfg, dataset, read=list)

    def transform_fn(example, tokenizer=None):
        chats = [chat_of(dict(zip(example, values)), dataset) for values in zip(*example.values())]
        beginnings = [messages[: turn + 1] for messages in chats for turn in answers(messages) or [0]]
        rows = [row_of(messages, tokenizer=tokenizer) for messages in beginnings]
        fields = ("input_ids", "labels", "prompt_length", "turn_spans")
        return {field: [row.get(field) for row in rows] for field in fields}

    # One chat at a time, so that its rows count as one document.
    return transform_fn, {"remove_columns": "__all__", "batched": True, "batch_size": 1}
