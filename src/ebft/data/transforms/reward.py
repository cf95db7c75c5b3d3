"""Transforms for reward models.

- `bradley_terry.chat_template`: pairs of replies, `{input, chosen, rejected}` -> `{chosen_ids, rejected_ids}`, rendered
  with the tokenizer's chat template. `chosen` and `rejected` are texts, the replies to the user message `input` after
  an optional `system` message; or lists of messages, whole conversations or what follows the messages in `prompt`.
  `margin` is the number by which the score of the chosen reply should exceed that of the rejected one.
- `stepwise_supervised`: steps, `{prompt, completions, labels}` -> `{input_ids, labels}`. The prompt is followed by the
  steps, each with the separator after it. The label of a step, its class, is that of the last token of its separator;
  all other tokens have the label -100. Prompt, steps and separators are tokenised separately, so the position of a
  label does not depend on the text around it.
"""

from typing import Any

from ebft.data.messages import Message, messages_of, row_kwargs, says_something, tools_of
from ebft.data.omissions import Omissions
from ebft.data.rendering import ChatTemplate
from ebft.data.tokens import Tokens
from ebft.data.transforms.rows import IGNORE, encode, first_present, first_text, optional_text, text_of
from ebft.errors import DataError

_PAIR_FIX = "Rename the columns, or use a custom transform that returns chosen_ids and rejected_ids."


def bradley_terry_chat_template(cfg, dataset, **kwargs):
    """Transform for pairs of replies, rendered with the chat template."""
    omissions = Omissions(cfg.chat_template or "of the tokenizer")

    def transform_fn(example, tokenizer=None):
        given = row_kwargs(example, dataset.chat_template_kwargs, cfg.chat_template_kwargs)
        template = ChatTemplate(tokenizer, cfg.chat_template, given, tools_of(example, dataset), closed=False)
        chats = {name: _chat(example, name) for name in ("chosen", "rejected")}
        if "prompt" not in example:
            _check_same(chats["chosen"], chats["rejected"])
        row = {f"{name}_ids": _ids(template, chat, omissions) for name, chat in chats.items()}
        return {**row, "margin": example["margin"]} if "margin" in example else row

    return transform_fn, {"remove_columns": "__all__"}


def _chat(example: dict[str, Any], name: str) -> list[Message]:
    """The conversation that ends with the reply `name`; empty if it is missing."""
    column = first_present(example, [name], "replies", _PAIR_FIX)
    if not isinstance(example[column], list):
        reply = text_of(example, column)
        asked = first_text(example, ["input"], "the user message", _PAIR_FIX)
        if not reply.strip() or not asked.strip():
            return []
        system = optional_text(example, "system")
        before = [{"role": "system", "content": system}] if system.strip() else []
        return [*before, {"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
    messages = messages_of(example[column], f"column {column!r}")
    if not messages:
        return []
    if messages[-1]["role"] != "assistant":
        raise DataError(f"column {column!r} must end with an assistant message, the reply that is compared.")
    if not (says_something(messages[-1]) or messages[-1].get("tool_calls")):
        return []
    asked = messages_of(example["prompt"], "column 'prompt'") if "prompt" in example else []
    return _continued(asked, messages, column)


def _continued(asked: list[Message], messages: list[Message], column: str) -> list[Message]:
    """The whole conversation of a column that contains it, or only what follows `asked`."""
    if messages[: len(asked)] == asked:
        return messages
    if asked[-1]["role"] == "user" and messages[0]["role"] != "assistant":
        raise DataError(
            f"column {column!r} starts with a message of the role {messages[0]['role']!r} that is not the one in "
            "column 'prompt'. Provide whole conversations that start with the prompt, or only the replies to it."
        )
    return [*asked, *messages]


def _check_same(chosen: list[Message], rejected: list[Message]) -> None:
    if chosen and rejected and chosen[:-1] != rejected[:-1]:
        raise DataError(
            "the columns 'chosen' and 'rejected' have different messages before their last one. Provide two replies "
            "to the same messages; if replies consist of several messages, put what they have in common into 'prompt'."
        )


def _ids(template: ChatTemplate, chat: list[Message], omissions: Omissions) -> list[int]:
    if not chat:
        return []
    chat = omissions.with_known_roles(chat, template)
    tokens = Tokens(template.tokenizer, template(chat))
    omissions.check(chat, template, {len(chat) - 1}, tokens.text)
    return tokens.ids


_STEP_FIX = "Rename the columns, or use a custom transform that returns input_ids and labels."


def stepwise_supervised(cfg, dataset, **kwargs):
    """Transform for a prompt with labelled steps."""

    def transform_fn(example, tokenizer=None):
        for column in ("prompt", "completions", "labels"):
            first_present(example, [column], column, _STEP_FIX)
        steps, classes = _steps(example)
        separator = encode(tokenizer, dataset.step_separator, special=False)
        completion, labels = [], []
        for number, (step, label) in enumerate(zip(steps, classes)):
            ids = [*encode(tokenizer, step, special=False), *separator]
            is_trained = not dataset.train_on_last_step_only or number == len(steps) - 1
            completion += ids
            labels += [*[IGNORE] * (len(ids) - 1), label if is_trained else IGNORE]
        kept = slice(dataset.max_completion_length)
        prompt = _prompt(tokenizer, text_of(example, "prompt"))
        return {"input_ids": [*prompt, *completion[kept]], "labels": [*[IGNORE] * len(prompt), *labels[kept]]}

    return transform_fn, {"remove_columns": "__all__"}


def _prompt(tokenizer: Any, text: str) -> list[int]:
    """The prompt after BOS, if the tokenizer has it; others would end the prompt with EOS as well."""
    ids, bos = encode(tokenizer, text, special=False), tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _steps(example: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The texts and the classes of the steps; booleans are the classes 0 and 1."""
    steps, labels = example["completions"] or [], example["labels"] or []
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise DataError("column 'completions' must contain a list with the text of each step.")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError("column 'labels' must contain a list with the class of each step (true, false or an integer).")
    if len(steps) != len(labels):
        raise DataError(f"the row has {len(steps)} steps in 'completions' and {len(labels)} in 'labels'.")
    return steps, [int(label) for label in labels]
