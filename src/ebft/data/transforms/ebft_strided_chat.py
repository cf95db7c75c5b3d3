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

_BEGINNING = "messages up to an answer"  # key of a row


def transform(cfg, dataset, **kwargs):
    """Transform for chats; the references are all assistant turns, or those that the dataset selects."""
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset), labels=turn_labels(cfg, dataset))


def transform_last_turn(cfg, dataset, **kwargs):
    """Transform for chats; the reference is the last assistant turn."""
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset))


def transform_all_turns(cfg, dataset, **kwargs):
    """Transform for chats in which every answer is a reference, with one row each."""
    row_of, _ = chat_transform(cfg, dataset, read=lambda row: row[_BEGINNING])

    def transform_fn(example, tokenizer=None):
        (chat,) = (dict(zip(example, values)) for values in zip(*example.values()))
        messages = chat_of(chat, dataset)
        beginnings = [{**chat, _BEGINNING: messages[: turn + 1]} for turn in answers(messages) or [0]]
        rows = [row_of(row, tokenizer=tokenizer) for row in beginnings]
        fields = ("input_ids", "labels", "prompt_length", "turn_spans")
        return {field: [row.get(field) for row in rows] for field in fields}

    # One chat at a time, so that its rows count as one document.
    return transform_fn, {"remove_columns": "__all__", "batched": True, "batch_size": 1}
