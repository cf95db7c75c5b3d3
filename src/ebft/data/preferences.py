"""Rows of preference data as token ids: the prompt, and each completion with the token that ends it.

Texts are tokenised separately, so that no token spans the boundary. A chat is tokenised as a whole, as the chat
template renders it; the prompt is what the chats of all completions have in common with the generation prompt. Only the
tokens of completions are scored.

Rows of reward models: a comparison has `chosen_ids` and `rejected_ids`, and `margin` if any row has one other than 0; a
row of steps has `input_ids` and `labels`. Rows that cannot be used are dropped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from os.path import commonprefix
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from ebft.config.keys.data import DataSettings
from ebft.data import row_counts
from ebft.data.apply import IDS, WITH_REASON, Source, apply_transform, check_fields, plain
from ebft.data.load import LoadedRows, load_sections, transformed_rows
from ebft.data.messages import TOOLS, Message, check_turns, row_kwargs, says_something, text_or_messages
from ebft.data.prompts import RowWithPrompt
from ebft.data.rendering import ChatTemplate, split_by_template, split_markers, warn_of_split_markers
from ebft.data.tokens import Tokens, ids_after
from ebft.data.transforms import wanted_rows
from ebft.data.transforms.formats import STYLES
from ebft.data.transforms.rows import COMPLETIONS, IGNORE, continued_ids, with_eos
from ebft.data.turns import Places
from ebft.errors import DataError

Text = str | list[Message]

FEATURES = {
    "preferences": Features({"prompt_ids": IDS, "chosen_ids": IDS, "rejected_ids": IDS, **WITH_REASON}),
    "labelled": Features({"prompt_ids": IDS, "completion_ids": IDS, "label": Value("bool"), **WITH_REASON}),
}


class PreferenceRow(RowWithPrompt):
    """Converts the result of a transform to the columns of `FEATURES`."""

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        names = COMPLETIONS[self.required.kind]
        others = ["label"] if self.required.kind == "labelled" else []
        check_fields(row, ("prompt", *names, *others), self.hint)
        prompt, *completions = (text_or_messages(row[name], name) for name in ("prompt", *names))
        if len({type(text) for text in (prompt, *completions) if not _is_empty(text)}) > 1:
            raise DataError(f"prompt, {' and '.join(names)} must all be text, or all lists of messages")
        wrong = [row[name] for name in others if row[name] not in (0, 1)]  # True and False are equal to them
        if wrong:
            raise DataError(f"label must be true (desirable) or false, got {wrong[0]!r:.60}. Convert it to booleans")
        labels = {name: bool(row[name]) for name in others}
        reason = row_counts.NO_COMPLETION if any(map(_is_empty, completions)) else ""
        reason = row_counts.NO_PROMPT if _is_empty(prompt) else reason
        prompt_ids, completion_ids = ([], [[] for _ in names]) if reason else self._ids(row, prompt, completions)
        if not reason and len(prompt_ids) + max(map(len, completion_ids)) > self.sequence_len:
            reason = row_counts.COMPLETION_TOO_LONG
        if not reason and len(names) == 2 and completion_ids[0] == completion_ids[1]:
            row_counts.note_lost(row_counts.EQUAL)
        columns = {f"{name}_ids": ids for name, ids in zip(names, completion_ids, strict=True)}
        return {"prompt_ids": prompt_ids, **columns, **labels, "reason": reason}

    def _ids(self, row: Mapping[str, Any], prompt: Text, completions: list[Text]) -> tuple[list[int], list[list[int]]]:
        if isinstance(prompt, str):
            tokenizer = self.renderer.tokenizer
            ended = [with_eos(tokenizer, ids_after(tokenizer, prompt, text)) for text in completions]
            return continued_ids(tokenizer, prompt), ended
        template = self.renderer.template.with_tools(row.get(TOOLS), row_kwargs(row))
        prompt, *completions = (
            self.omissions.with_known_roles(messages, template) for messages in (prompt, *completions)
        )
        chats = [[*prompt, *completion] for completion in completions]
        for chat in chats:
            check_turns(chat)
        texts = [Tokens(template.tokenizer, template(chat)) for chat in chats]
        for tokens, chat in zip(texts, chats, strict=True):
            self.omissions.check(chat, template, range(len(prompt), len(chat)), tokens.text)
        start = template(prompt, add_generation_prompt=True)
        if not all(tokens.text.startswith(start) for tokens in texts):
            start = self._shared_start(template, chats, len(prompt))
        # A token can span the boundary in one of the chats only.
        length = min(tokens.before(len(start)) for tokens in texts)
        length = len(commonprefix([tokens.ids[:length] for tokens in texts]))
        return texts[0].ids[:length], [tokens.ids[length:] for tokens in texts]

    def _shared_start(self, template: ChatTemplate, chats: list[list[Message]], replied: int) -> str:
        """The prompt as it is rendered before the completions, if that is not how it is rendered on its own.

        What comes after its messages, such as a thinking block that one completion has, may differ."""
        places = [Places(template, chat) for chat in chats]
        starts = [found.text[: found.of(replied).start] for found in places]
        shared = commonprefix(starts)
        if len({*starts}) > 1 and not shared.startswith(template(chats[0][:replied])):
            raise DataError(
                f"chat template {template.name} renders the messages before the completions differently before each of "
                "them, so the prompt cannot be separated from the completions. Use another chat_template"
            )
        return shared


def _is_empty(text: Text) -> bool:
    if isinstance(text, str):
        return not text.strip()
    return not any(says_something(message) or message.get("tool_calls") for message in text)


def load_preference_rows(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """The training rows and the evaluation rows (None if the config holds no data out).

    Columns: `prompt_ids`, and `chosen_ids` and `rejected_ids`, or `completion_ids` and `label`. Rows are not cut: those
    whose prompt and longest completion exceed `sequence_len` are dropped, with a count for each reason. Raises
    DataError if a source cannot be read, a row is malformed, or no usable rows are left.
    """
    features = FEATURES[config.required_rows.kind]
    warned: set[str] = set()  # styles

    def load_entry(source: Source, counts: row_counts.RowCounts) -> Dataset:
        entry = source.entry
        name = str(entry.type).partition(".")[0]
        if name in STYLES and name not in warned:
            warned.add(name)
            style, known = STYLES[name], split_by_template(tokenizer)  # a warning named them already
            split = split_markers(tokenizer, f"{style.header}{style.end}")
            lacking = [marker for marker in split if marker not in known]
            warn_of_split_markers(f"datasets.type: {entry.type}", lacking)
        check = PreferenceRow(config, tokenizer, entry.chat_template_kwargs)
        return apply_transform(source, config, tokenizer, check, features, counts)

    return load_sections(config, load_entry).without("document")


def load_comparisons(config: DataSettings, tokenizer: PreTrainedTokenizerBase) -> LoadedRows:
    """Rows of `chosen_ids` and `rejected_ids`, and of `margin` if any is not 0.

    A pair is dropped if either text exceeds `sequence_len`.
    """
    hint = wanted_rows(config.required_rows)

    def check(row: Mapping[str, Any]) -> dict[str, Any]:
        names = ("chosen_ids", "rejected_ids")
        chosen, rejected = (_ids(row, name, hint, len(tokenizer)) for name in names)
        too_long = max(len(chosen), len(rejected)) > config.sequence_len
        reason = row_counts.NO_REPLY if not (chosen and rejected) else row_counts.REPLY_TOO_LONG if too_long else ""
        margin = row.get("margin", 0.0)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise DataError(f"margin must be a finite number, got {margin!r:.60}. Correct the column, or remove it.")
        return {"chosen_ids": chosen, "rejected_ids": rejected, "margin": margin, "reason": reason}

    features = Features({"chosen_ids": IDS, "rejected_ids": IDS, "margin": Value("float64"), **WITH_REASON})
    loaded = load_sections(config, transformed_rows(config, tokenizer, check, features)).without("document")
    has_margin = any(np.any(rows["margin"]) for rows in (loaded.train, loaded.evaluation) if rows is not None)
    return loaded if has_margin else loaded.without("margin")


def load_steps(config: DataSettings, tokenizer: PreTrainedTokenizerBase, num_labels: int) -> LoadedRows:
    """Rows of `input_ids` and `labels`, which are below `num_labels` or -100; cut to `sequence_len` tokens."""
    hint = wanted_rows(config.required_rows)

    def check(row: Mapping[str, Any]) -> dict[str, Any]:
        ids, labels = _ids(row, "input_ids", hint, len(tokenizer)), _ids(row, "labels", hint, num_labels)
        if len(ids) != len(labels):
            raise DataError(f"labels has {len(labels)} entries, but input_ids has {len(ids)}.")
        kept = slice(config.sequence_len)
        is_empty = all(label == IGNORE for label in labels[kept])
        reason = row_counts.NO_STEP if is_empty else row_counts.TRUNCATED if len(ids) > config.sequence_len else ""
        return {"input_ids": ids[kept], "labels": labels[kept], "reason": reason}

    features = Features({"input_ids": IDS, "labels": IDS, **WITH_REASON})
    return load_sections(config, transformed_rows(config, tokenizer, check, features)).without("document")


def _ids(row: Mapping[str, Any], name: str, hint: str, vocabulary: int) -> list[int]:
    """The token ids of a field; of labels, IGNORE as well."""
    check_fields(row, [name], hint)
    ids = plain(row[name])
    known = range(vocabulary)  # Arrow would round 1.5 in silence
    unknown = next((token for token in ids if token not in known and (name, token) != ("labels", IGNORE)), None)
    if unknown is not None:
        raise DataError(f"{name} contains {unknown}, which is not one of {vocabulary} tokens or classes (num_labels).")
    return ids
