"""Transforms of chats, `{messages}`, rendered with the chat template.

For strided mode and SFT, `{input_ids, labels, prompt_length, turn_spans}`:
- `chat_template`, `ebft_strided_chat`: every assistant turn is trained on, or those that keys of the dataset select;
  `_last_turn` the last one; `_all_turns` makes one row per answer, each with its full history.
- `ebft_opencode_strided`, `alpaca_chat`: rows with a prompt and a completion, as a user turn and its answer.
- `ebft_reasoning_strided`: with the thinking in the last turn.

For structured mode and `rl: grpo`, `{prompt, ground_truth}`, with an assistant turn as the reference:
- `ebft_chat_multiturn`: the first answer, with the rest of the chat as `remaining_turns`; `_last_turn` the last one;
  `_all_turns` one row per answer. A chat without an answer is a prompt without a reference.
- `ebft_opencode`, `alpaca_chat_prompts`: rows with a prompt and a completion.
- `ebft_reasoning`: replies that contain thinking, in tags (`ebft.data.tokens.TAGS`) or as `reasoning_content`: the
  whole reply, `_answer_only` without it, `_split_thinking` with the thinking of earlier turns separated.

`ebft.mask_thinking_ce` removes the labels of thinking blocks.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.messages import (
    Message,
    answers,
    before_last_answer,
    chat_of,
    content_text,
    each_answer,
    replies,
    reply_column,
    row_kwargs,
    says_something,
    template_columns,
    tools_of,
    with_system,
)
from ebft.data.omissions import Omissions
from ebft.data.rendering import ChatTemplate
from ebft.data.tokens import THINKING, Tokens, split_thinking, thinking_spans, with_thinking
from ebft.data.transforms.rows import (
    each_row,
    encode,
    first_present,
    prompt_and_completion,
    row_without_prompt,
    segments_row,
    text_of,
    text_row,
    without_labels,
)
from ebft.data.turns import Places, TurnLabels, trained_ranges, turn_labels
from ebft.errors import DataError
from ebft.nemo_gym.keys import path_in

_BEGINNING = "messages up to an answer"  # key of a row


def ebft_strided_chat(cfg, dataset, **kwargs):
    """Transform for chats; the references are all assistant turns, or those that the dataset selects."""
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset), labels=turn_labels(cfg, dataset))


chat_template = ebft_strided_chat


def ebft_strided_chat_last_turn(cfg, dataset, **kwargs):
    """Transform for chats; the reference is the last assistant turn."""
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset))


def ebft_strided_chat_all_turns(cfg, dataset, **kwargs):
    """Transform for chats in which every answer is a reference, with one row each."""
    row_of, _ = chat_transform(cfg, dataset, read=lambda row: row[_BEGINNING])

    def transform_fn(example, tokenizer=None):
        chat, messages = _single(example, dataset)
        beginnings = [{**chat, _BEGINNING: messages[: turn + 1]} for turn in each_answer(messages) or [0]]
        rows = [row_of(row, tokenizer=tokenizer) for row in beginnings]
        return _as_columns(rows, ("input_ids", "labels", "prompt_length", "turn_spans"))

    return transform_fn, {"remove_columns": "__all__", **_SINGLE}


def ebft_chat_multiturn(cfg, dataset, **kwargs):
    """Transform for whole conversations: the first answer, then what follows up to the last assistant turn."""

    def read(example):
        messages = chat_of(example, dataset)
        turns = answers(messages)
        # A turn that only calls a tool has no text; it is part of the prompt of the first turn that has text.
        first = next((index for index in turns if says_something(messages[index])), None)
        if first is None:
            row = {**_prompt_row(*before_last_answer(messages)), "remaining_turns": []}
        else:
            remaining = messages[first + 1 : turns[-1] + 1]
            row = {**_prompt_row(messages[:first], messages[first]), "remaining_turns": remaining}
        return row | template_columns(example, dataset)

    return each_row(read)


def ebft_chat_multiturn_last_turn(cfg, dataset, **kwargs):
    """Transform for chats whose last assistant turn is the reference."""
    return _last_answers(dataset, partial(chat_of, entry=dataset))


def ebft_chat_multiturn_all_turns(cfg, dataset, **kwargs):
    """Transform for chats in which every assistant turn is a reference, with one row each."""

    def read(example):
        chat, messages = _single(example, dataset)
        turns = each_answer(messages)
        rows = [_prompt_row(messages[:index], messages[index]) for index in turns] or [_prompt_row(messages, None)]
        rows = [row | template_columns(chat, dataset) for row in rows]
        return _as_columns(rows, dict.fromkeys(name for row in rows for name in row))

    transform_fn, map_kwargs = each_row(read)
    return transform_fn, {**map_kwargs, **_SINGLE}


# One chat at a time, so that its rows count as one document.
_SINGLE = {"batched": True, "batch_size": 1}


def _single(batch: dict[str, list], entry: Any) -> tuple[dict[str, Any], list[Message]]:
    """The row of a batch of one, and its messages."""
    (chat,) = (dict(zip(batch, values)) for values in zip(*batch.values()))
    return chat, chat_of(chat, entry)


def _as_columns(rows: list[dict[str, Any]], fields: Iterable[str]) -> dict[str, list]:
    return {field: [row.get(field) for row in rows] for field in fields}


def _prompt_row(prompt: list[Message], reply: Message | None) -> dict:
    return {"prompt": prompt, "ground_truth": None if reply is None else content_text(reply), **reply_column(reply)}


def ebft_opencode(cfg, dataset, **kwargs):
    """Transform for rows with a prompt and a reference completion."""
    return _last_answers(dataset, _pair_chat)


def _last_answers(entry: Any, read: Callable[[dict[str, Any]], list[Message]]) -> tuple[Callable, dict]:
    """Transform to rows of prompts; the reference is the last answer of the messages that `read` returns."""
    return each_row(lambda row: _prompt_row(*before_last_answer(read(row))) | template_columns(row, entry))


def ebft_opencode_strided(cfg, dataset, **kwargs):
    """Transform for strided mode and SFT, as `ebft_strided_chat` for the user turn and its answer."""
    return chat_transform(cfg, dataset, _pair_chat)


def _pair_chat(example: dict[str, Any]) -> list[Message]:
    prompt, completion = prompt_and_completion(example)
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def ebft_reasoning(cfg, dataset, **kwargs):
    """Transform for references including their thinking."""
    return _reasoning(dataset, _rendered)


def ebft_reasoning_answer_only(cfg, dataset, **kwargs):
    """Transform for references without their thinking."""
    return _reasoning(
        dataset, lambda reply, _: {"role": "assistant", "content": split_thinking(content_text(reply))[1]}
    )


def ebft_reasoning_split_thinking(cfg, dataset, **kwargs):
    """Transform that passes the thinking of earlier turns to the chat template separately, which may render or omit it.

    The reference keeps its thinking, in `<think>` tags regardless of its original tags.
    """
    return _reasoning(dataset, lambda reply, tokenizer: _rendered(_apart(reply), tokenizer), in_prompt=_apart)


def ebft_reasoning_strided(cfg, dataset, **kwargs):
    """Transform for strided mode, as `ebft_strided_chat` with the thinking in the last turn."""
    return chat_transform(cfg, dataset, partial(chat_of, entry=dataset), with_reply=_rendered)


def _reasoning(dataset, reference, in_prompt=None):
    def transform_fn(example, tokenizer=None):
        prompt, reply = before_last_answer(chat_of(example, dataset))
        if in_prompt is not None:
            prompt = [in_prompt(message) if message["role"] == "assistant" else message for message in prompt]
        row = {"prompt": prompt, "ground_truth": None, **template_columns(example, dataset)}
        if reply is None:
            return row
        reply = reference(reply, tokenizer)
        return {**row, "ground_truth": with_thinking(reply)["content"], **reply_column(reply)}

    return transform_fn, {"remove_columns": "__all__"}


def _rendered(reply: Message, tokenizer: Any) -> Message:
    """The reply with its thinking where the chat template renders it: in a key of its own, or else in the content."""
    has_key = any(reply.get(key) for key in THINKING)
    return reply if has_key and ChatTemplate(tokenizer).thinking_keys else with_thinking(reply)


def _apart(reply: Message) -> Message:
    """The reply with its thinking in `reasoning_content` and only the answer in the content."""
    thinking, answer = split_thinking(content_text(reply))
    return {**reply, "content": answer, **({"reasoning_content": thinking} if thinking else {})}


_ALPACA_FIX = "Name its columns with a mapping as type: {field_instruction: ..., field_output: ...}."


def alpaca_chat(cfg, dataset, **kwargs):
    """Transform for questions and answers; the answer is trained on."""
    return chat_transform(cfg, dataset, partial(_alpaca_chat, entry=dataset))


def alpaca_chat_prompts(cfg, dataset, **kwargs):
    """Transform for questions with their answers as references."""
    return _last_answers(dataset, partial(_alpaca_chat, entry=dataset))


def _alpaca_chat(example: dict[str, Any], entry: Any) -> list[Message]:
    asked = first_present(example, ["question", "instruction"], "the question", _ALPACA_FIX)
    answer = first_present(example, ["answer" if asked == "question" else "output"], "the answer", _ALPACA_FIX)
    parts = [asked, *(["input"] if asked == "instruction" and "input" in example else [])]
    question = "\n\n".join(text for text in (text_of(example, column) for column in parts) if text)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text_of(example, answer)}]
    return with_system(messages, example, entry)


def chat_transform(
    cfg: Any,
    entry: Any,
    read: Callable[[dict[str, Any]], list[Message]],
    with_reply: Callable[[Message, PreTrainedTokenizerBase], Message] | None = None,
    labels: TurnLabels | None = None,
) -> tuple[Callable, dict]:
    """Transform for chats; `read` returns the messages (`role`, `content`) of a row of the dataset `entry`.

    Messages after the last turn that is trained on are removed, and `prompt_length` is the start of that turn.
    `turn_spans` are the token ranges of all turns that are trained on, with their ends. `labels` are the turns to train
    on, in chats that may come with tools; if None, the last assistant turn, to which `with_reply` is applied first, as
    in the prompts of structured mode.
    `ebft.mask_thinking_ce` removes the labels of thinking blocks in assistant turns.
    """
    template = cfg.chat_template or "of the tokenizer"
    train_on_inputs = cfg.train_on_inputs
    mask_thinking = cfg.ebft.mask_thinking_ce
    eos = "turn" if labels is None else labels.eos
    known: dict[str, ChatTemplate] = {}  # by the text of the template
    omissions = Omissions(template)

    def transform_fn(example, tokenizer=None):
        if tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template. Set chat_template (chatml, llama3, or Jinja text).")
        messages = read(example)
        if labels is None:
            turns, is_learned = replies(messages)[-1:], says_something  # calls cannot be compared with a reference
        else:
            # The model does not learn to say nothing.
            is_learned = lambda message: says_something(message) or message.get("tool_calls")
            turns = [turn for turn in labels.turns(messages) if is_learned(messages[turn])]
        last = messages[turns[-1]] if turns else {}
        last = with_reply(last, tokenizer) if turns and with_reply is not None else last
        if not is_learned(last):
            # The filter counts this as a row without a reference; templates may fail to render such a chat.
            text = "\n".join(str(message.get("content", "")) for message in messages)
            return segments_row([(encode(tokenizer, text, special=False), False), ([], True)], False)
        messages = [*messages[: turns[-1]], last]
        first = next((turn for turn in turns if turn and messages[turn]["role"] == "assistant"), turns[-1])
        if messages[first]["role"] == "assistant" and not any(map(says_something, messages[:first])):
            return row_without_prompt()
        if tokenizer.chat_template not in known:
            known[tokenizer.chat_template] = ChatTemplate(tokenizer, template, cfg.chat_template_kwargs)
        kwargs = row_kwargs(example, entry.chat_template_kwargs)
        render = known[tokenizer.chat_template].with_tools(tools_of(example, entry), kwargs)
        messages = omissions.with_known_roles(messages, render)
        found = Places(render, messages)
        omissions.check(messages, render, turns, found.text)
        places = found.turns(turns)
        trained, ends = trained_ranges(found, places, eos)
        if eos != "none":
            for index, place in zip(turns, places, strict=True):
                omissions.check_end(messages[index], found.text[place.ends : place.stop])
        tokens = Tokens(tokenizer, found.text)
        off = [False] * len(tokens.ids) if train_on_inputs else [not on for on in tokens.mask([*trained, *ends])]
        if mask_thinking:
            replied = (place for index, place in zip(turns, places) if messages[index]["role"] == "assistant")
            thoughts = [span for place in replied for span in thinking_spans(found.text, place.start, place.stop)]
            off = [left or right for left, right in zip(off, tokens.mask(thoughts), strict=True)]
        row = text_row(tokens.ids) | {"prompt_length": tokens.before(places[-1].start)}
        return {
            **without_labels(row, off),
            "turn_spans": tokens.ranges_of([(place.start, place.stop) for place in places if place.start < place.stop]),
        }

    return transform_fn, {"remove_columns": "__all__"}


def nemo_gym(cfg, dataset, **kwargs):
    """Transform for rows of NeMo Gym."""
    names = {path_in(cfg.nemo_gym_dir, entry.path): entry.server_name for entry in cfg.nemo_gym_datasets}
    server_name = names.get(path_in(".", dataset.path))

    def read(example):
        row = _parsed(example["line"])
        messages, server = _messages(row["responses_create_params"]), _server(row, server_name)
        return {"prompt": messages, "nemo_gym_row": example["line"], "nemo_gym_server": server}

    return each_row(read)


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"the line is not valid JSON ({error}).") from error
    params = row.get("responses_create_params") if isinstance(row, dict) else None
    if not isinstance(params, dict) or not isinstance(params.get("input"), str | list):
        raise DataError("a row of NeMo Gym must contain responses_create_params with the messages in `input`.")
    return row


def _server(row: dict[str, Any], server_name: str | None) -> str:
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else None
    name = server_name if name is None else name
    if not isinstance(name, str) or not name:
        raise DataError(
            "the row has no agent_ref with a name, and its file has no server_name. Set server_name in "
            "nemo_gym_datasets."
        )
    return name


def _messages(params: dict[str, Any]) -> list[Message]:
    """The messages of a request of the Responses API, as a chat template expects them."""
    given = params["input"]
    given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [{"role": "system", "content": params["instructions"]}] if params.get("instructions") else []
    for item in given:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output")})
        elif kind in (None, "message") and isinstance(item, dict) and "role" in item:
            messages.append({"role": item["role"], "content": item.get("content")})
        elif kind != "reasoning":  # templates leave out earlier reasoning
            raise DataError(f"responses_create_params.input contains {item!r:.80}, which is not a supported message.")
    return messages
