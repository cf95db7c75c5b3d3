"""Questions and answers as chats: `{question, answer}` -> one user turn and its answer, with the chat template.

`load_qa` returns `{input_ids, labels, prompt_length}`, `load_qa_prompts` `{prompt, ground_truth}` of the same chat.
"""

from functools import partial
from typing import Any

from ebft.data.chats import with_system
from ebft.data.messages import Message
from ebft.data.transforms.chat import chat_transform
from ebft.data.transforms.rows import first_present, text_of

_FIX = "Name its columns with a mapping as type: {field_instruction: ..., field_output: ...}."


def load_qa(cfg, dataset, **kwargs):
    """Transform for questions and answers; the answer is trained on."""
    return chat_transform(cfg, dataset, partial(_chat, entry=dataset))


def load_qa_prompts(cfg, dataset, **kwargs):
    """Transform for questions with their answers as references."""

    def transform_fn(example, tokenizer=None):
        *prompt, reply = _chat(example, dataset)
        return {"prompt": prompt, "ground_truth": reply["content"]}

    return transform_fn, {"remove_columns": "__all__"}


def _chat(example: dict[str, Any], entry: Any) -> list[Message]:
    question, answer = (
        text_of(example, first_present(example, [name], f"the {name}", _FIX)) for name in ("question", "answer")
    )
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return with_system(messages, example, entry)
