"""Questions with answers, or rows of Alpaca, as chats: one user turn and its answer, rendered with the chat template.

`{question, answer}` or `{instruction, input, output}` -> `{input_ids, labels, prompt_length}`; `transform_prompts`
returns `{prompt, ground_truth}` of the same chat.
"""

from functools import partial
from typing import Any

from ebft.data.chats import template_columns, with_system
from ebft.data.messages import Message
from ebft.data.transforms.chat import chat_transform
from ebft.data.transforms.rows import first_present, text_of

_FIX = "Name its columns with a mapping as type: {field_instruction: ..., field_output: ...}."


def transform(cfg, dataset, **kwargs):
    """Transform for questions and answers; the answer is trained on."""
    return chat_transform(cfg, dataset, partial(_chat, entry=dataset))


def transform_prompts(cfg, dataset, **kwargs):
    """Transform for questions with their answers as references."""

    def transform_fn(example, tokenizer=None):
        *prompt, reply = _chat(example, dataset)
        return {"prompt": prompt, "ground_truth": reply["content"], **template_columns(example, dataset)}

    return transform_fn, {"remove_columns": "__all__"}


def _chat(example: dict[str, Any], entry: Any) -> list[Message]:
    asked = first_present(example, ["question", "instruction"], "the question", _FIX)
    answer = first_present(example, ["answer" if asked == "question" else "output"], "the answer", _FIX)
    parts = [asked, *(["input"] if asked == "instruction" and "input" in example else [])]
    question = "\n\n".join(text for text in (text_of(example, column) for column in parts) if text)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text_of(example, answer)}]
    return with_system(messages, example, entry)
