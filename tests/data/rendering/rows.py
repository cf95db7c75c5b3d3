"""Rows of a conversation as each method loads them, in one form: the ids, and which of them are trained on."""

import json
import warnings
from functools import cache
from typing import NamedTuple

from ebft.data import apply, conversation, preferences, prompts, row_counts, transforms
from ebft.run.config.schema import RunConfig
from tests.data.rendering.expected import Chat, ranges, tokenizer_of


class Found(NamedTuple):
    """One text of a row: its ids, and the ranges of them that are trained on or compared."""

    ids: list[int]
    spans: list[tuple[int, int]]
    all_turns: bool = False  # every reply is trained on or compared, not only the last
    is_sampled: bool = False  # the model samples other replies
    is_reference: bool = False  # replies are compared without their end


STRUCTURED = {"rl": "ebft"}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided", "context_length": 2, "generate_max_len": 2}}
SETTINGS = {
    "strided": (STRIDED, "ebft_strided_chat.transform"),
    "sft": ({}, "chat_template"),
    "opencode": (STRUCTURED, "ebft_opencode.transform"),
    "last_turn": (STRUCTURED, "ebft_chat_multiturn.transform_last_turn"),
    "reasoning": (STRUCTURED, "ebft_reasoning.transform"),
    "multiturn": (STRUCTURED, "ebft_chat_multiturn.transform"),
    "dpo": ({"rl": "dpo"}, "chat_template.default"),
    "kto": ({"rl": "kto", "micro_batch_size": 2}, "passthrough"),
    "reward_model": ({"reward_model": True}, "bradley_terry.chat_template"),
}


@cache
def config_of(method: str) -> RunConfig:
    keys, type_ = SETTINGS[method]
    values = {"base_model": "unused", "sequence_len": 4000, "datasets": [{"path": "rows.jsonl", "type": type_}], **keys}
    with warnings.catch_warnings(action="ignore"):
        return RunConfig.from_dict(values)


def raw_row(method: str, chat: Chat) -> dict:
    """The row of a data file for a conversation."""
    others = {"tools": chat.tools, "chat_template_kwargs": chat.kwargs}
    others = {key: value for key, value in others.items() if value is not None}
    *asked, reply = chat.messages
    if method == "opencode":
        return {"input": asked[0]["content"], "output": reply["content"], **others}
    if method == "dpo":
        return {"messages": asked, "chosen": reply, "rejected": worse(reply), **others}
    if method == "kto":
        return {"prompt": asked, "completion": [reply], "label": True, **others}
    if method == "reward_model":
        return {"chosen": [*asked, reply], "rejected": [*asked, worse(reply)], **others}
    return {"messages": chat.messages, **others}


def worse(reply: dict) -> dict:
    """Another reply, which differs at its end."""
    if reply.get("tool_calls"):
        return {**reply, "tool_calls": [{**reply["tool_calls"][0], "function": {"name": "other", "arguments": {}}}]}
    if isinstance(reply["content"], list):
        return {**reply, "content": [*reply["content"], " Or not"]}
    return {**reply, "content": f"{reply['content']} Or not"}


def rows_of(method: str, name: str, chat: Chat) -> list[Found]:
    """The texts of the row of a conversation: one, or for pairs the chosen and the rejected one. Raises Dropped."""
    config, tokenizer, raw = config_of(method), tokenizer_of(name), raw_row(method, chat)
    if method in ("strided", "sft"):
        row = kept(apply.tokeniser(config.datasets[0], config, tokenizer)(raw, 0))
        trained = [label != -100 for label in row["labels"]]
        wrong = [a for a, b in zip(row["labels"], row["input_ids"]) if a not in (-100, b)]
        assert not wrong, f"labels that are not the tokens: {wrong}"
        return [Found(row["input_ids"], ranges(trained), True, is_sampled=method == "strided")]
    if method in ("dpo", "kto"):
        row = kept(preferences.PreferenceRow(config, tokenizer)(transformed(config, tokenizer, raw)))
        names = ("chosen_ids", "rejected_ids") if method == "dpo" else ("completion_ids",)
        start = len(row["prompt_ids"])
        return [Found([*row["prompt_ids"], *row[key]], [(start, start + len(row[key]))]) for key in names]
    if method == "reward_model":
        row = transformed(config, tokenizer, raw)
        return [Found(row[name], []) for name in ("chosen_ids", "rejected_ids")]
    packed = kept(prompts.PromptRow(config, tokenizer)(transformed(config, tokenizer, raw)))
    ids, spans = [], []
    for turn in conversation.Renderer(tokenizer).of_row(json.loads(packed["row"])).turns:
        ids += turn.lead_ids
        spans.append((len(ids), len(ids) + len(turn.reference_ids)))
        ids += turn.reference_ids
    return [Found(ids, spans, method == "multiturn", is_sampled=True, is_reference=True)]


def kept(row):
    if row["reason"]:
        raise row_counts.Dropped(row["reason"])
    return row


def transformed(config, tokenizer, raw):
    """What the transform makes of a row; all other columns are removed, as loading does."""
    entry = config.datasets[0]
    transform_fn, arguments = transforms.find_transform(entry.type)(apply.ConfigView(config), dataset=entry)
    assert arguments["remove_columns"] == "__all__"
    return transform_fn(dict(raw), tokenizer=tokenizer)
