"""Rows of each kind that methods train on, made of examples, and the functions of texts that they share.

- Tokens, `{input_ids, labels, prompt_length, turn_spans}`, for SFT and strided mode: all tokens of raw text are labels,
  of a pair the tokens of the completion, of a chat the tokens of the turns that are trained on. Special
  tokens are those that the tokenizer adds; documents longer than `sequence_len` are later cut into windows.
- Prompts, `{prompt, ground_truth}`, for structured mode and `rl: grpo`, with a reply as the reference.
- Preferences, `{prompt, chosen, rejected}` or `{prompt, completion, label}`.
- Comparisons, `{chosen_ids, rejected_ids, margin}`, for reward models: whole conversations.
- Steps, `{input_ids, labels}`, for process reward models.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.config.keys.data import path_in
from ebft.data import messages as chats
from ebft.data import tokens
from ebft.data.messages import Message, says_something
from ebft.data.omissions import Omissions
from ebft.data.rendering import ChatTemplate
from ebft.data.row_counts import EMPTY, NO_PROMPT, NO_REFERENCE, NO_REPLY, Dropped, first_present, text_of, value_of
from ebft.data.transforms import TRANSFORMS, PreferenceColumns
from ebft.data.transforms.formats import Example, Row, reader
from ebft.data.turns import Places, TurnLabels, trained_ranges, turn_labels
from ebft.errors import DataError

IGNORE = -100  # label of tokens that are ignored in the loss
MASKS = ("completion_mask", "assistant_masks")  # columns of TRL: 0 for tokens that are not trained on
COMPLETIONS = {
    "preferences": ("chosen", "rejected"),
    "labelled": ("completion",),
    "comparisons": ("chosen", "rejected"),
}
_ALL: dict[str, Any] = {"remove_columns": "__all__"}
Transform = tuple[Callable, dict[str, Any]]


def built_in_transform(name: str, cfg: Any, dataset: Any, **kwargs: Any) -> Transform:
    """The built-in transform `name` of a dataset, to the rows that the run trains on if it makes several kinds."""
    found = TRANSFORMS[name]
    if found.format == "steps":
        return _steps(dataset)
    if found.format == "segments":
        return _segments(cfg, dataset)
    if found.format == "tokens":
        return _tokenised(cfg)
    if found.format == "nemo_gym":
        return _nemo_gym(cfg, dataset)
    kind = cfg.required_rows.kind if cfg.required_rows.kind in found.rows else found.rows[0]
    read = reader(found.format, dataset, COMPLETIONS.get(kind, ()))
    if kind in ("preferences", "labelled"):
        return _preferences(dataset, read, kind)
    if kind == "comparisons":
        return _comparisons(cfg, dataset, read)
    if kind == "prompts" and found.format == "as_is":
        given = lambda row: {name: value_of(row, name) for name in row if name != "system"}  # no message
        asked = lambda row: {"prompt": chats.chat_in_json(row["prompt"])} if "prompt" in row else {}
        return lambda row, tokenizer=None: given(row) | asked(row) | chats.template_columns(row, dataset), {}
    if kind == "prompts":
        return _prompts(dataset, read, found.replies)
    if found.format in ("texts", "alpaca", "user_defined"):
        return _pair_tokens(cfg, read)
    if found.format == "text":
        return _text_tokens(read, is_ended=found.replies == "ended")
    return _chat_tokens(cfg, dataset, read, found.replies)


def _text_tokens(read: Callable[[Row], Example], is_ended: bool) -> Transform:
    """Raw text, with EOS at the end of each document if it `is_ended`."""

    def transform_fn(example, tokenizer=None):
        (text,) = read(example).replies
        ids, eos = encode(tokenizer, text, special=True) if text.strip() else [], tokenizer.eos_token_id
        return text_row([*ids, eos] if is_ended and ids and eos not in (None, ids[-1]) else ids)

    return transform_fn, _ALL


def _pair_tokens(cfg: Any, read: Callable[[Row], Example]) -> Transform:
    """A text that continues another."""

    def transform_fn(example, tokenizer=None):
        found = read(example)
        prompt, (completion,) = found.prompt, found.replies
        if not (prompt.strip() and completion.strip()):
            raise Dropped(NO_REFERENCE if prompt.strip() else NO_PROMPT)
        prompt_ids = continued_ids(tokenizer, prompt)
        completion_ids = with_eos(tokenizer, tokens.ids_after(tokenizer, prompt, completion))
        row = segments_row([(prompt_ids, False), (completion_ids, True)], cfg.train_on_inputs)
        if not cfg.ebft.mask_thinking_ce:
            return row
        row["turn_spans"] = [[row["prompt_length"], len(row["input_ids"])]]  # thinking is sampled too
        thought = tokens.mask_after(tokenizer, prompt, completion, tokens.thinking_spans(completion))
        masked = [False] * len(prompt_ids) + thought
        return without_labels(row, masked + [False] * (len(row["labels"]) - len(masked)))  # its EOS is trained on

    return transform_fn, _ALL


def _chat_tokens(cfg: Any, entry: Any, read: Callable[[Row], Example], replies: str) -> Transform:
    """Chats: `replies` are the turns that are trained on, "all" that the dataset selects, "last", or each in a row.
    Messages after the last of these turns are removed, and `prompt_length` is the start of that turn."""
    render = _Chats(cfg, entry, turn_labels(cfg, entry) if replies == "all" else None, with_reply=replies == "rendered")
    if replies != "each":
        return lambda example, tokenizer=None: render(example, read(example).prompt, tokenizer), _ALL

    def each(example, tokenizer=None):
        messages = read(example).prompt
        turns = chats.each_answer(messages) or [len(messages) - 1]
        return [render(example, messages[: turn + 1], tokenizer) for turn in turns]

    return each, {**_ALL, "many": True}


class _Chats:
    """Makes rows of tokens of chats; without `labels`, the last reply is trained on, as references of prompts are."""

    def __init__(self, cfg: Any, entry: Any, labels: TurnLabels | None, with_reply: bool) -> None:
        self.cfg, self.entry, self.labels, self.with_reply = cfg, entry, labels, with_reply
        self.template = cfg.chat_template or "of the tokenizer"
        self.known: dict[str, ChatTemplate] = {}  # by the text of the template
        self.omissions = Omissions(self.template)

    def __call__(self, example: Row, messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        if self.labels is None:  # calls cannot be compared with a reference
            turns = [turn for turn in chats.replies(messages)[-1:] if says_something(messages[turn])]
        else:  # the model does not learn to say nothing
            calls = [bool(message.get("tool_calls")) for message in messages]
            turns = [turn for turn in self.labels.turns(messages) if says_something(messages[turn]) or calls[turn]]
        if not turns:
            raise Dropped(NO_REFERENCE if messages else EMPTY)  # templates may fail to render such a chat
        chats.check_turns(messages)
        last = messages[turns[-1]]
        messages = [*messages[: turns[-1]], rendered_reply(last, tokenizer) if self.with_reply else last]
        first = next((turn for turn in turns if turn and messages[turn]["role"] == "assistant"), turns[-1])
        if messages[first]["role"] == "assistant" and not any(map(says_something, messages[:first])):
            raise Dropped(NO_PROMPT)
        if tokenizer.chat_template not in self.known:
            template = ChatTemplate(tokenizer, self.template, self.cfg.chat_template_kwargs)
            self.known[tokenizer.chat_template] = template
        kwargs = chats.row_kwargs(example, self.entry.chat_template_kwargs)
        template = self.known[tokenizer.chat_template].with_tools(chats.tools_of(example, self.entry), kwargs)
        messages = self.omissions.with_known_roles(messages, template)
        return self._row(messages, turns, template)

    def _row(self, messages: list[Message], turns: list[int], template: ChatTemplate) -> dict[str, Any]:
        found, eos = Places(template, messages), "turn" if self.labels is None else self.labels.eos
        self.omissions.check(messages, template, turns, found.text)
        places = found.turns(turns)
        trained, ends = trained_ranges(found, places, eos)
        if messages[turns[-1]]["role"] == "assistant":
            self.omissions.check_start(template, found.text, places[-1].start)
        if eos != "none":
            for index, place in zip(turns, places, strict=True):
                self.omissions.check_end(messages[index], found.text[place.ends : place.stop])
        whole = tokens.Tokens(template.tokenizer, found.text)
        is_on = [True] * len(whole.ids) if self.cfg.train_on_inputs else whole.mask([*trained, *ends])
        off = [not on for on in is_on]
        if self.cfg.ebft.mask_thinking_ce:
            replied = (place for index, place in zip(turns, places) if messages[index]["role"] == "assistant")
            thoughts = [
                span for place in replied for span in tokens.thinking_spans(found.text, place.start, place.stop)
            ]
            off = [left or right for left, right in zip(off, whole.mask(thoughts), strict=True)]
        row = text_row(whole.ids) | {"prompt_length": whole.before(places[-1].start)}
        spans = whole.ranges_of([(place.start, place.stop) for place in places if place.start < place.stop])
        return {**without_labels(row, off), "turn_spans": spans}


def _prompts(entry: Any, read: Callable[[Row], Example], replies: str) -> Transform:
    """Prompts; `replies` says which reply of a chat is the reference, and in what form."""

    def transform_fn(example, tokenizer=None):
        found = read(example)
        if found.replies:
            return {"prompt": found.prompt, "ground_truth": found.replies[0]}
        columns = chats.template_columns(example, entry)
        if replies == "each":
            messages = found.prompt
            turns = chats.each_answer(messages)
            rows = [_prompt(messages[:index], messages[index]) for index in turns] or [_prompt(messages, None)]
            return [row | columns for row in rows]
        return {**_REFERENCES[replies](found.prompt, tokenizer), **columns}

    return transform_fn, {**_ALL, "many": True} if replies == "each" else _ALL


def _prompt(prompt: list[Message], reply: Message | None) -> dict[str, Any]:
    if reply is None:
        return {"prompt": prompt, "ground_truth": None}
    has_more = reply.keys() > {"role", "content"}  # such as thinking or tool calls
    return {"prompt": prompt, "ground_truth": reply.get("content", ""), **({chats.REPLY: reply} if has_more else {})}


def _first(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The first answer with text, and what follows up to the last one as `remaining_turns`."""
    turns = chats.answers(messages)
    first = next((index for index in turns if says_something(messages[index])), None)
    if first is None:
        return {**_prompt(*chats.before_last_answer(messages)), "remaining_turns": []}
    return {**_prompt(messages[:first], messages[first]), "remaining_turns": messages[first + 1 : turns[-1] + 1]}


def _reasoned(
    change: Callable[[Message, PreTrainedTokenizerBase], Message],
    in_prompt: Callable[[Message], Message] = lambda message: message,
) -> Callable[[list[Message], PreTrainedTokenizerBase], dict[str, Any]]:
    """The last answer, which `change` converts, with its thinking, after replies that `in_prompt` converts."""

    def reference(messages, tokenizer):
        prompt, reply = chats.before_last_answer(messages)
        prompt = [in_prompt(message) if message["role"] == "assistant" else message for message in prompt]
        if reply is None:
            return _prompt(prompt, None)
        reply = change(reply, tokenizer)
        return {**_prompt(prompt, reply), "ground_truth": tokens.with_thinking(reply)["content"]}

    return reference


def rendered_reply(reply: Message, tokenizer: PreTrainedTokenizerBase) -> Message:
    """The reply with its thinking where the chat template renders it: in a key of its own, or else in the content."""
    has_key = any(reply.get(key) for key in tokens.THINKING)
    return reply if has_key and ChatTemplate(tokenizer).thinking_keys else tokens.with_thinking(reply)


def _apart(reply: Message) -> Message:
    """The reply with its thinking in `reasoning_content` and only the answer in the content."""
    thinking, answer = tokens.split_thinking(reply.get("content", ""))
    return {**reply, "content": answer, **({"reasoning_content": thinking} if thinking else {})}


_REFERENCES = {
    "first": _first,
    # A chat without an answer is a prompt without a reference.
    "last": lambda messages, tokenizer: _prompt(*chats.before_last_answer(messages)),
    "rendered": _reasoned(rendered_reply),
    "answer": _reasoned(
        lambda reply, tokenizer: {"role": "assistant", "content": tokens.split_thinking(reply.get("content", ""))[1]}
    ),
    # The template may render or omit the thinking of earlier turns; the reference keeps its own, in <think> tags.
    "split": _reasoned(lambda reply, tokenizer: rendered_reply(_apart(reply), tokenizer), in_prompt=_apart),
}


def _preferences(entry: Any, read: Callable[[Row], Example], kind: str) -> Transform:
    """Replies that are compared, or one with a label."""
    label = entry.type.field_label if isinstance(entry.type, PreferenceColumns) else None

    def transform_fn(example, tokenizer=None):
        found = read(example)
        row = {"prompt": found.prompt, **dict(zip(COMPLETIONS[kind], found.replies))}
        if kind == "labelled":
            column = first_present(example, [label or "label"], "the label", "Name it in field_label of a mapping.")
            row["label"] = value_of(example, column)
        return row if isinstance(found.prompt, str) else row | chats.template_columns(example, entry)

    return transform_fn, _ALL


def _comparisons(cfg: Any, entry: Any, read: Callable[[Row], Example]) -> Transform:
    """Whole conversations that end with the replies that are compared, for reward models."""
    omissions = Omissions(cfg.chat_template or "of the tokenizer")

    def transform_fn(example, tokenizer=None):
        given = chats.row_kwargs(example, entry.chat_template_kwargs, cfg.chat_template_kwargs)
        template = ChatTemplate(tokenizer, cfg.chat_template, given, chats.tools_of(example, entry), closed=False)
        found, row = read(example), {}
        for name, reply in zip(COMPLETIONS["comparisons"], found.replies):
            if not reply or not (says_something(reply[-1]) or reply[-1].get("tool_calls")):
                raise Dropped(NO_REPLY)
            chats.check_turns([*found.prompt, *reply])
            chat = omissions.with_known_roles([*found.prompt, *reply], template)
            whole = tokens.Tokens(tokenizer, template(chat))
            omissions.check(chat, template, {len(chat) - 1}, whole.text)
            row[f"{name}_ids"] = whole.ids
        return {**row, "margin": value_of(example, "margin")} if "margin" in example else row

    return transform_fn, _ALL


def _steps(entry: Any) -> Transform:
    """A prompt and steps, each with a separator whose last token has the class of the step; all are tokenised apart."""

    def transform_fn(example, tokenizer=None):
        steps, classes = (value_of(example, column) or [] for column in ("completions", "labels"))
        are_lists = isinstance(steps, list) and isinstance(classes, list) and len(steps) == len(classes)
        if not are_lists or not all(isinstance(label, int) for label in classes):
            raise DataError("'completions' and 'labels' must be lists of equal length: steps, and an integer for each.")
        separator = encode(tokenizer, entry.step_separator, special=False)
        completion, labels = [], []
        for number, (step, label) in enumerate(zip(steps, classes)):
            ids = [*encode(tokenizer, step, special=False), *separator]
            is_trained = not entry.train_on_last_step_only or number == len(steps) - 1
            completion += ids
            labels += [*[IGNORE] * (len(ids) - 1), int(label) if is_trained else IGNORE]
        kept, prompt = slice(entry.max_completion_length), encode(tokenizer, text_of(example, "prompt"), special=False)
        if tokenizer.bos_token_id not in (None, *prompt[:1]):  # not with `special`, which could end it with EOS as well
            prompt = [tokenizer.bos_token_id, *prompt]
        return {"input_ids": [*prompt, *completion[kept]], "labels": [*[IGNORE] * len(prompt), *labels[kept]]}

    return transform_fn, _ALL


def _segments(cfg: Any, entry: Any) -> Transform:
    """Segments, `{text, label}`, are tokenised apart and without special tokens; `label: true` ones are trained on."""
    columns = [entry.field] if entry.field else ["segments"]

    def transform_fn(example, tokenizer=None):
        column = first_present(example, columns, "segments", "Set `field` of the entry to its name.")
        segments = value_of(example, column) or []
        for number, segment in enumerate(segments):
            is_one = isinstance(segment, dict) and isinstance(segment.get("label"), bool)
            if not is_one or not isinstance(segment.get("text"), str | None):
                raise DataError(f"column {column!r}, segment {number}: expected {{text: ..., label: true or false}}.")
        parts = [(encode(tokenizer, each["text"] or "", special=False), each["label"]) for each in segments]
        return _joined_row([(token, label) for ids, label in parts for token in ids], cfg.train_on_inputs)

    return transform_fn, _ALL


def _tokenised(cfg: Any) -> Transform:
    """Rows of `input_ids`, and optionally `attention_mask`, and `labels`, -100 where none is trained on, or `MASKS`."""

    def transform_fn(example, tokenizer=None):
        first_present(example, ["input_ids"], "tokens", "Set the type of the dataset, or add the column.")
        columns = "input_ids", "labels", "attention_mask", *MASKS
        ids, labels, mask, *others = (value_of(example, name) if name in example else None for name in columns)
        mask = [1] * len(ids or ()) if mask is None else mask
        if labels is None:
            given = [ids or (), *(other for other in others if other is not None)]
            is_whole = len({*map(len, given)}) == 1
            labels = [token if all(is_on) else IGNORE for token, *is_on in zip(*given)] if is_whole else []
        if problem := _problem_of_tokens(ids, labels, mask, len(tokenizer)):
            raise DataError(problem)
        pairs = [(token, label != IGNORE) for token, label, is_kept in zip(ids, labels, mask) if is_kept]
        return _joined_row(pairs, cfg.train_on_inputs)

    return transform_fn, _ALL


def _problem_of_tokens(ids: Any, labels: Any, mask: Any, known: int) -> str | None:
    """What is wrong with a row of tokens, if anything is."""
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        return f"input_ids must be a list of numbers of tokens, got {ids!r:.60}"
    if not len(ids) == len(labels) == len(mask):
        return f"there are {len(ids)} input_ids, but {len(labels)} labels and {len(mask)} values of attention_mask"
    if ids and not 0 <= min(ids) <= max(ids) < known:
        return f"input_ids has {max(ids)} and {min(ids)}, but the tokenizer has {known} tokens"
    if wrong := [pair for pair in zip(labels, ids) if pair[0] not in (IGNORE, pair[1])]:
        return f"the label {wrong[0][0]} of the token {wrong[0][1]} is neither the same nor {IGNORE}"
    has_gaps = "0" in "".join("1" if value else "0" for value in mask).strip("0")
    return "attention_mask has gaps" if has_gaps else None


def _joined_row(tokens: list[tuple[int, bool]], train_on_inputs: bool) -> dict[str, Any]:
    """Fields of a row of (token, trained on); each run of tokens that are trained on is a turn."""
    groups = itertools.groupby(tokens, key=lambda pair: pair[1])
    joined = [([token for token, _ in group], label) for label, group in groups]
    row = segments_row(joined or [([], True)], train_on_inputs)
    ends = list(itertools.accumulate(len(ids) for ids, _ in joined))
    row["turn_spans"] = [[end - len(ids), end] for end, (ids, label) in zip(ends, joined) if label]
    if joined and not joined[-1][1] and len(joined) > 1:
        row["prompt_length"] -= len(joined[-2][0])  # the last segment is not trained on
    return row


def _nemo_gym(cfg: Any, dataset: Any) -> Transform:
    """Rows of NeMo Gym, as lines."""
    names = {path_in(cfg.nemo_gym_dir, entry.path): entry.server_name for entry in cfg.nemo_gym_datasets}
    server_name = names.get(path_in(".", dataset.path))

    def transform_fn(example, tokenizer=None):
        line = value_of(example, "line")
        row = json.loads(line)
        server = (row.get("agent_ref") or {}).get("name") or server_name
        if not server:
            raise DataError("the row has no agent_ref with a name. Set server_name in nemo_gym_datasets.")
        messages = _messages(row["responses_create_params"])
        return {"prompt": messages, "nemo_gym_row": line, "nemo_gym_server": server}

    return transform_fn, _ALL


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


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    """Token ids of a text, with the special tokens that the tokenizer adds (such as BOS) if `special`.

    They are not added to a text that already starts or ends with them.
    """
    ids = tokens.token_ids(tokenizer, text)
    if not special:
        return ids
    own, whole = (tokenizer("x", add_special_tokens=added, verbose=False)["input_ids"] for added in (False, True))
    at = next((at for at in range(len(whole)) if whole[at : at + len(own)] == own), len(whole))
    before, after = whole[:at], whole[at + len(own) :]  # the special tokens that the tokenizer adds to a text
    start = [] if ids[: len(before)] == before else before
    return [*start, *ids, *([] if after and ids[-len(after) :] == after else after)]


def continued_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a text that is continued, with the special tokens that the tokenizer puts before it.

    Some tokenizers end every text with EOS, which is removed; an EOS in the text itself, such as the end of a turn, is
    kept.
    """
    ids, eos = encode(tokenizer, prompt, special=True), tokenizer.eos_token_id
    if ids[-1:] != [eos]:
        return ids
    own = encode(tokenizer, prompt, special=False)
    return ids if _ending(ids, eos) == _ending(own, eos) else ids[:-1]


def _ending(ids: list[int], token: int) -> int:
    """How many times `ids` ends with a token."""
    return next((number for number, other in enumerate(reversed(ids)) if other != token), len(ids))


def text_row(input_ids: list[int]) -> dict[str, Any]:
    """Fields of a raw text: all tokens are labels, and there is no prompt."""
    return {"input_ids": input_ids, "labels": list(input_ids), "prompt_length": 0}


def segments_row(segments: list[tuple[list[int], bool]], train_on_inputs: bool) -> dict[str, Any]:
    """Fields of a row that consists of (token ids, trained on) segments; the last one is the reference.

    `prompt_length` counts all tokens before the last segment. Labels are -100 for tokens that are not trained on.
    """
    input_ids = [token for ids, _ in segments for token in ids]
    labels = [token if trained or train_on_inputs else IGNORE for ids, trained in segments for token in ids]
    return {"input_ids": input_ids, "labels": labels, "prompt_length": len(input_ids) - len(segments[-1][0])}


def without_labels(row: dict[str, Any], masked: list[bool]) -> dict[str, Any]:
    """The row with label -100 for the tokens that are `masked`."""
    labels = [IGNORE if off else label for label, off in zip(row["labels"], masked, strict=True)]
    return {**row, "labels": labels}


def with_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """A reference ends with EOS, so that the model learns where to stop."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token to end a completion with. Set special_tokens.eos_token.")
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
