"""Token ids of prompts, replies and the text between them, tokenised in the same way for sampling and for features.

A prompt is a text or a list of messages. A conversation continues with `remaining_turns`, the messages after the first
reply: user turns that are given, and assistant turns that are references. References are the tokens that the chat
template renders for them in the whole conversation; what it puts between two replies is given to the policy.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data.json_files import without_missing
from ebft.data.messages import REPLY, TOOLS, Message, as_texts, is_context, row_kwargs, says_something
from ebft.data.rendering import ChatTemplate
from ebft.data.tokens import Tokens, end_tokens, ids_after, mask_after, thinking_spans
from ebft.data.transforms.rows import continued_ids
from ebft.data.turns import Places
from ebft.errors import DataError, warn

Prompt = str | list[Message]

# Characters of the conversations that are cached, so that rollouts, reward and cross-entropy of a batch share one
# rendering. With their tokens, they take about 25 bytes per character.
REMEMBERED = 2**22


@dataclass(frozen=True)
class Turn:
    """One reply of a conversation: the ids between the previous reply and this one, and its reference.

    The first `ended` of `lead_ids` end the previous reply. `thinking` marks the ids of the reference that belong to
    thinking blocks, None if the tokenizer cannot tell.
    """

    lead_ids: list[int]
    reference_ids: list[int]
    ended: int = 0
    thinking: list[bool] | None = None


@dataclass(frozen=True)
class Conversation:
    """A prompt and the turns that follow; `turns[0].lead_ids` are the ids of the prompt.

    `generation_prompt_ids` are the prompt as it is rendered for sampling. The prompt of a reference ends before them
    where they open something that the rendered reference does not contain, such as a thinking block: the policy then
    writes the rest, as the reference does. `end_id` is the token that ends the last reply, None if there is none.
    """

    turns: list[Turn]
    generation_prompt_ids: list[int]
    end_id: int | None = None

    @property
    def prompt_ids(self) -> list[int]:
        return self.turns[0].lead_ids

    @property
    def reference_ids(self) -> list[int]:
        """The reference conversation after the prompt, including user turns, without a final end-of-turn token."""
        return self._reference(None)

    def _reference(self, longest: int | None) -> list[int]:
        ids = list(self.turns[0].reference_ids[:longest])
        for turn in self.turns[1:]:
            ids += [*turn.lead_ids, *turn.reference_ids[:longest]]
        return ids

    def compared(
        self, prompt_ids: list[int], samples: list[list[int]], longest: int | None = None
    ) -> tuple[list[int], list[list[int]]]:
        """Return the ids that all sequences start with, and how the samples, which follow `prompt_ids`, and then the
        reference go on: each with those ids is a whole sequence.

        `longest`: the number of tokens at which replies are cut, replies of the reference as well as of the samples.
        """
        shared = len(commonprefix([prompt_ids, self.prompt_ids]))
        continued = [prompt_ids[shared:] + ids for ids in samples]
        return prompt_ids[:shared], [*continued, self.prompt_ids[shared:] + self._reference(longest)]


class Renderer:
    """Converts prompts, references and conversations to token ids with a tokenizer and its chat template.

    `chat_template_kwargs` and `tools` are arguments of the template for all rows, `template` its name for messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[Any] | None = None,
        template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, template, chat_template_kwargs, tools)
        self._rendered: dict[str, Conversation] = {}
        self._characters = 0  # of its keys
        self._reported = False

    def of_row(self, row: Mapping[str, Any], compares: bool = True) -> Conversation:
        """The prompt of a row with its references. Raises DataError if a message is invalid or cannot be rendered.

        If the row has no reference, or with `compares=False`, the first reply is not compared: the prompt is then the
        generation prompt. The last ones, of up to `REMEMBERED` characters, are cached, so that a conversation is
        rendered once per step.
        """
        prompt, reference, remaining = row["prompt"], row.get("ground_truth"), list(row.get("remaining_turns") or [])
        if not (compares and isinstance(reference, str) and reference.strip()):
            reference = ""
        reply = (_json(row, REPLY) if reference else None) or {"role": "assistant", "content": reference}
        key = repr((prompt, reply, remaining, _json(row, TOOLS), row_kwargs(row)))
        if key not in self._rendered:
            self._rendered[key] = self._conversation(self.template_of(row), prompt, reply, bool(reference), remaining)
            self._characters += len(key)
            while self._characters > REMEMBERED and len(self._rendered) > 1:
                oldest = next(iter(self._rendered))
                self._characters -= len(oldest)
                del self._rendered[oldest]
        return self._rendered[key]

    def template_of(self, row: Mapping[str, Any]) -> ChatTemplate:
        """The chat template with the arguments and the tools of a row."""
        return self.template.with_tools(_json(row, TOOLS), row_kwargs(row))

    def _conversation(
        self, template: ChatTemplate, prompt: Prompt, reply: Message, has_reference: bool, remaining: list[Message]
    ) -> Conversation:
        remaining = as_texts(remaining)
        given = self.prompt_ids(prompt, template)
        if isinstance(prompt, str):
            if any(map(is_reply, remaining)):
                raise DataError("remaining_turns requires a prompt of messages, as the chat template joins the turns")
            text = reply["content"]
            ids = without_end(ids_after(self.tokenizer, prompt, text), self.template.end_ids)
            is_fast = self.tokenizer.is_fast
            thinking = mask_after(self.tokenizer, prompt, text, thinking_spans(text))[: len(ids)] if is_fast else None
            return Conversation([Turn(given, ids, thinking=thinking)], given, self.tokenizer.eos_token_id)
        last = max((index for index, message in enumerate(remaining) if is_reply(message)), default=-1)
        messages = [*as_texts([*prompt, reply]), *remaining[: last + 1]]
        following = range(len(prompt) + 1, len(messages))
        replies = [len(prompt), *(index for index in following if is_reply(messages[index]))]
        end_id = self.tokenizer.eos_token_id if template.end_of_turn_id is None else template.end_of_turn_id
        if not has_reference:
            return Conversation(self._given_turns(template, messages, replies, given), given, end_id)
        turns, last_end = self._turns(template, messages, replies)
        self._report(template, given, turns[0])
        return Conversation(turns, given, end_id if last_end is None else last_end)

    def _turns(
        self, template: ChatTemplate, messages: list[Message], replies: list[int]
    ) -> tuple[list[Turn], int | None]:
        """The turns as the template renders them in the whole conversation, and the token that ends the last one."""
        found = Places(template, messages)
        tokens, known = Tokens(self.tokenizer, found.text), end_tokens(self.tokenizer)
        turns: list[Turn] = []
        done = ended = 0  # tokens before the next lead, and how many of it end a reply
        for index, place in zip(replies, found.turns(replies), strict=True):
            first, last, stop = map(tokens.before, place)
            tail = tokens.ids[last:stop]
            ends = [number for number, token in enumerate(tail) if token == template.end_of_turn_id]
            ends = ends or [number for number, token in enumerate(tail) if token in known]
            last += ends[0] if ends else 0
            ids = tokens.ids[first:last]
            if index == replies[-1]:  # of others, what follows depends on it
                ids = without_end(ids, self.template.end_ids)
            thinking = None
            if self.tokenizer.is_fast:
                thoughts = thinking_spans(found.text, place.start, place.stop)
                thinking = tokens.mask(thoughts)[first : first + len(ids)]
            turns.append(Turn(tokens.ids[done:first], ids, ended, thinking))
            done, ended = last, int(bool(ends))
        return turns, tokens.ids[done] if ended else None

    def _given_turns(
        self, template: ChatTemplate, messages: list[Message], replies: list[int], given: list[int]
    ) -> list[Turn]:
        """The turns without a reference for the first reply: what is given before each, with generation prompts."""
        turns = [Turn(given, [])]
        for before, index in zip(replies, replies[1:]):
            text = template.after_reply(messages[:before], messages[before + 1 : index], add_generation_prompt=True)
            ids = ids_after(self.tokenizer, "", text)
            ended = next((number + 1 for number, token in enumerate(ids) if token in self.template.end_ids), 0)
            content = messages[index].get("content") or ""
            reference = without_end(ids_after(self.tokenizer, text, content), self.template.end_ids)
            turns.append(Turn(ids, reference, ended))
        return turns

    def _report(self, template: ChatTemplate, given: list[int], turn: Turn) -> None:
        """One line if prompts end before the template's generation prompt does."""
        if self._reported or given == turn.lead_ids:
            return
        self._reported = True
        shared = len(commonprefix([given, turn.lead_ids]))
        # Of the template only, so that the line is the same for all rows.
        end, common = (self.tokenizer.decode(ids[-5:]) for ids in (given, given[:shared]))
        warn(
            f"Chat template {template.name}: the generation prompt ends with {end!r}, but rendered references go on "
            f"differently after {common!r}. Prompts end there, and the model has to write what follows as references "
            "have it. Arguments of the template (chat_template_kwargs, such as enable_thinking: false) may make both "
            "agree."
        )

    def prompt_ids(self, prompt: Prompt, template: ChatTemplate | None = None) -> list[int]:
        """Ids of a text with the tokenizer's special tokens, or of messages with the generation prompt."""
        if isinstance(prompt, str):
            ids = continued_ids(self.tokenizer, prompt) or self.tokenizer(prompt, verbose=False)["input_ids"]
        elif prompt and prompt[-1].get("role") == "assistant":
            raise DataError(
                "a prompt must not end with an assistant message: the policy generates a new reply and does not "
                "continue that message. End the prompt with a user message, and use the reply as ground_truth"
            )
        else:
            text = (template or self.template)(as_texts(prompt), add_generation_prompt=True)
            ids = Tokens(self.tokenizer, text).ids
        if not ids:
            raise DataError("cannot sample from an empty prompt. Provide a prompt, or use a tokenizer with a BOS token")
        return list(ids)


def longest_reference(rows: Any, renderer: Renderer) -> int | None:
    """The tokens of the longest reference of a reply in a Dataset; None if there is none, and for streams.

    Measured on the 32 rows whose references have the most characters.
    """
    if not hasattr(rows, "__len__") or not len(rows):
        return None
    turns = rows["remaining_turns"] if "remaining_turns" in rows.column_names else [None] * len(rows)
    sizes = [
        max(len(str(text or "")), *(len(str(message.get("content") or "")) for message in of_row or []), 0)
        for text, of_row in zip(rows["ground_truth"], turns)
    ]
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[:32]
    conversations = [renderer.of_row(rows[index]) for index in order if sizes[index]]
    return max((len(turn.reference_ids) for talk in conversations for turn in talk.turns), default=None)


def is_reply(message: Message) -> bool:
    """Whether a message is a reply that the policy is to give; one without text or with weight 0 is given."""
    return message.get("role") == "assistant" and not is_context(message) and says_something(message)


def without_end(ids: list[int], end_ids: Collection[int]) -> list[int]:
    """`ids` without a terminating end token; at most one is removed."""
    return ids[:-1] if ids and ids[-1] in end_ids else ids


def _json(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column that is JSON text or the value itself; without the keys that Arrow has added."""
    value = row.get(name)
    if isinstance(value, str):
        return json.loads(value) if value else None
    return without_missing(value) if name == TOOLS else value
