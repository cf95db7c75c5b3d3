"""Chats for structured mode: `{messages}` -> `{prompt, ground_truth}`, with an assistant turn as the reference.

`transform` uses the first turn that is an answer, with the rest of the chat as `remaining_turns`;
`transform_last_turn` uses the last turn; `transform_all_turns` makes one row per turn, each with its full history. A
chat without an answer is a prompt without a reference. Thinking of references is put into their text, as a `<think>`
block.
"""

from ebft.data.chats import chat_of
from ebft.data.messages import Message, answers, before_last_answer, content_text
from ebft.data.thinking import with_thinking


def transform(cfg, dataset, **kwargs):
    """Transform for whole conversations: the first answer, then what follows up to the last assistant turn."""

    def transform_fn(example, tokenizer=None):
        messages = chat_of(example, dataset)
        turns = answers(messages)
        # A turn that only calls a tool has no text; it is part of the prompt of the first turn that has text.
        first = next((index for index in turns if content_text(messages[index]).strip()), None)
        if first is None:
            return {**_row(*before_last_answer(messages)), "remaining_turns": []}
        rest = [
            with_thinking(messages[index]) if index in turns and messages[index].get("content") else messages[index]
            for index in range(first + 1, turns[-1] + 1)
        ]
        return {**_row(messages[:first], messages[first]), "remaining_turns": rest}

    return transform_fn, {"remove_columns": "__all__"}


def transform_last_turn(cfg, dataset, **kwargs):
    """Transform for chats whose last assistant turn is the reference."""

    def transform_fn(example, tokenizer=None):
        return _row(*before_last_answer(chat_of(example, dataset)))

    return transform_fn, {"remove_columns": "__all__"}


def transform_all_turns(cfg, dataset, **kwargs):
    """Transform for chats in which every assistant turn is a reference, with one row each."""

    def transform_fn(example, tokenizer=None):
        chats = [dict(zip(example, values)) for values in zip(*example.values())]
        rows = [row for chat in chats for row in _every_turn(chat_of(chat, dataset))]
        return {field: [row[field] for row in rows] for field in ("prompt", "ground_truth")}

    # One chat at a time, so that its rows count as one document.
    return transform_fn, {"remove_columns": "__all__", "batched": True, "batch_size": 1}


def _every_turn(messages: list[Message]) -> list[dict]:
    turns = answers(messages)
    if not turns:
        return [_row(messages, None)]
    return [_row(messages[:index], messages[index]) for index in turns]


def _row(prompt: list[Message], reply: Message | None) -> dict:
    return {"prompt": prompt, "ground_truth": None if reply is None else with_thinking(reply)["content"]}
