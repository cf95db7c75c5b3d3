"""Prompt/completion rows for structured mode: `{input, output}` -> `{prompt, ground_truth}`, with one user turn.

`transform_strided` returns `{input_ids, labels, prompt_length}` of the same chat. Other supported column names are in
`pairs.PAIRS`.
"""

from typing import Any

from ebft.data.chats import template_columns
from ebft.data.messages import Message
from ebft.data.transforms.chat import chat_transform
from ebft.data.transforms.pairs import prompt_and_completion


def transform(cfg, dataset, **kwargs):
    """Transform for rows with a prompt and a reference completion."""

    def transform_fn(example, tokenizer=None):
        user, assistant = _chat(example)
        return {"prompt": [user], "ground_truth": assistant["content"], **template_columns(example, dataset)}

    return transform_fn, {"remove_columns": "__all__"}


def transform_strided(cfg, dataset, **kwargs):
    """Transform for strided mode and SFT, as `ebft_strided_chat` for the user turn and its answer."""
    return chat_transform(cfg, dataset, _chat)


def _chat(example: dict[str, Any]) -> list[Message]:
    prompt, completion = prompt_and_completion(example)
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
