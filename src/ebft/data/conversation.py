"""Token ids of prompts, replies and the text between them, tokenised in the same way for sampling and for features.

A prompt is a text or a list of messages. A conversation continues with `remaining_turns`, the messages after the first
reply: user turns that are given, and assistant turns that are references. Replies are never rendered by the chat
template together with what follows; their ids are kept, and the template only provides the ids between two replies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ebft.data.joined import adds_space, ids_after
from ebft.data.messages import is_context
from ebft.data.special_tokens import end_tokens
from ebft.data.transforms.rows import continued_ids
from ebft.errors import DataError

Message = dict[str, Any]
Prompt = str | list[Message]

REMEMBERED = 1024  # cached conversations, so that rollouts, reward and cross-entropy of a batch share one rendering
_REPLY = "EBFT-REPLY-EBFT"  # placeholder for a reply, to find the text that the template puts after it


@dataclass(frozen=True)
class Turn:
    """One reply of a conversation: the ids between the previous reply and this one, and its reference."""

    lead_ids: list[int]
    reference: str
    reference_ids: list[int]


@dataclass(frozen=True)
class Conversation:
    """A prompt and the turns that follow; `turns[0].lead_ids` are the ids of the prompt."""

    turns: list[Turn]

    @property
    def prompt_ids(self) -> list[int]:
        return self.turns[0].lead_ids

    @property
    def reference_ids(self) -> list[int]:
        """The reference conversation after the prompt, including user turns, without a final end-of-turn token."""
        ids = list(self.turns[0].reference_ids)
        for turn in self.turns[1:]:
            ids += [*turn.lead_ids, *turn.reference_ids]
        return ids


class Renderer:
    """Converts prompts, references and conversations to token ids with a tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.kwargs: dict[str, Any] = dict(chat_template_kwargs or {})
        self._rendered: dict[str, Conversation] = {}

    def conversation(
        self, prompt: Prompt, ground_truth: str, remaining_turns: Iterable[Message] | None = None
    ) -> Conversation:
        """The prompt with its references. Raises DataError if a message is invalid or cannot be rendered.

        The last `REMEMBERED` conversations are cached, so that a conversation is rendered once per step.
        """
        remaining = list(remaining_turns or [])
        key = repr((prompt, ground_truth, remaining))
        if key not in self._rendered:
            conversation = self._conversation(prompt, ground_truth, remaining)
            if len(self._rendered) >= REMEMBERED:
                del self._rendered[next(iter(self._rendered))]
            self._rendered[key] = conversation
        return self._rendered[key]

    def _conversation(self, prompt: Prompt, ground_truth: str, remaining_turns: list[Message]) -> Conversation:
        turns = [Turn(self.prompt_ids(prompt), ground_truth, self.reference_ids(ground_truth, prompt))]
        before, reply = prompt, ground_truth  # what the newest reply is given, and its reference
        between: list[Message] = []
        for message in _clean(remaining_turns):
            if not is_reply(message):
                between.append(message)
                continue
            if not between:
                raise DataError(
                    "remaining_turns has two consecutive assistant turns; there must be a user turn between them"
                )
            reference = _text(message.get("content"))
            gap = self.gap_ids(before, between)
            before, reply = [*before, {"role": "assistant", "content": reply}, *between], reference
            turns.append(Turn(gap, reference, self.reference_ids(reference, before)))
            between = []
        return Conversation(turns)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Ids of a text with the tokenizer's special tokens, or of messages with the generation prompt."""
        if isinstance(prompt, str):
            ids = continued_ids(self.tokenizer, prompt) or self.tokenizer(prompt, verbose=False)["input_ids"]
        elif prompt and prompt[-1].get("role") == "assistant":
            raise DataError(
                "a prompt must not end with an assistant message: the policy generates a new reply and does not "
                "continue that message. End the prompt with a user message, and use the reply as ground_truth"
            )
        else:
            ids = self._apply(_clean(prompt), tokenize=True)["input_ids"]
        if not ids:
            raise DataError("cannot sample from an empty prompt. Provide a prompt, or use a tokenizer with a BOS token")
        return list(ids)

    def reference_ids(self, text: str, prompt: Prompt) -> list[int]:
        """Ids of a reference after `prompt`, without special tokens and without a terminating end-of-turn token.

        They are those of the text alone, unless the tokenizer adds a space to it.
        """
        before, lead = self._before_reply(prompt) if text and self._adds_space else ("", "")
        return without_end(ids_after(self.tokenizer, before, lead + text), self.end_ids())

    @cached_property
    def _adds_space(self) -> bool:
        return adds_space(self.tokenizer)

    def _before_reply(self, prompt: Prompt) -> tuple[str, str]:
        """The text of a prompt, and the white space that the chat template puts between it and a reply."""
        if isinstance(prompt, str):
            return prompt, ""
        messages = _clean(prompt)
        before = self._apply(messages, tokenize=False)
        reply = {"role": "assistant", "content": _REPLY}
        whole = self._apply([*messages, reply], tokenize=False, add_generation_prompt=False)
        lead = whole[len(before) :].partition(_REPLY)[0] if whole.startswith(before) else ""
        return before, lead if lead.isspace() else ""

    def gap_ids(self, before: Prompt, messages: list[Message]) -> list[int]:
        """Ids between a reply to `before` and the next one: its end of turn, `messages`, the generation prompt."""
        if isinstance(before, str):
            raise DataError("remaining_turns requires a prompt of messages, since the chat template joins the turns")
        text = self._after_reply(_clean(before), messages, True)
        return ids_after(self.tokenizer, "", text)

    def end_id(self, prompt: Prompt) -> int | None:
        """The token that ends a reply to `prompt`: the template's end of turn for messages, else end of sequence."""
        end_of_turn = None if isinstance(prompt, str) else self.end_of_turn_id
        return self.tokenizer.eos_token_id if end_of_turn is None else end_of_turn

    def end_ids(self) -> set[int]:
        """Tokens that end a reply: end of sequence, and the chat template's end of turn if it is a special token."""
        return {self.tokenizer.eos_token_id, self.end_of_turn_id} - {None}

    @cached_property
    def end_of_turn(self) -> str:
        """The text that the chat template writes after a reply, empty if there is none or if it is unknown."""
        if self.tokenizer.chat_template is None:
            return ""
        try:
            return self._after_reply([{"role": "user", "content": "?"}], [], False)
        except DataError:  # the end of turn of a template that does not accept such a chat is unknown
            return ""

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The token that the chat template writes after a reply; None if it is not a special or added token."""
        ids = ids_after(self.tokenizer, "", self.end_of_turn)
        return ids[0] if ids and ids[0] in end_tokens(self.tokenizer) else None

    def _after_reply(self, before: list[Message], after: list[Message], add_generation_prompt: bool) -> str:
        """What the template writes after a reply to the messages `before`, with the messages `after` following it."""
        reply = _REPLY
        while any(reply in str(message) for message in (*before, *after)):
            reply += "-EBFT"
        messages = [*before, {"role": "assistant", "content": reply}, *after]
        text = self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        if reply not in text:
            raise DataError("the chat template omits an assistant turn, so turns cannot be separated")
        return text.rpartition(reply)[2]

    def _apply(self, messages: list[Message], tokenize: bool, add_generation_prompt: bool = True) -> Any:
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, but the prompt is a list of messages. Set chat_template (chatml, "
                "llama3, or Jinja text), or use text as prompt"
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=tokenize,
                add_generation_prompt=add_generation_prompt,
                **({"return_dict": True} if tokenize else {}),
                **self.kwargs,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the chat template cannot render these messages: {error}") from error


def is_reply(message: Message) -> bool:
    """Whether a message is a reply that the policy is to give; one that only calls tools or has weight 0 is given."""
    if message.get("role") != "assistant" or is_context(message):
        return False
    return not (message.get("content") is None and message.get("tool_calls"))


def without_end(ids: list[int], end_ids: set[int]) -> list[int]:
    """`ids` without a terminating end token; at most one is removed."""
    return ids[:-1] if ids and ids[-1] in end_ids else ids


def end_length(lead_ids: list[int], end_ids: Collection[int]) -> int:
    """Number of ids at the start of `lead_ids` that end the previous reply: up to its end token, 0 without one."""
    return next((index + 1 for index, token in enumerate(lead_ids) if token in end_ids), 0)


def _clean(messages: Iterable[Message]) -> list[Message]:
    """Messages without keys that are None: Arrow adds the keys of all messages, and templates check for presence."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise DataError(f"the content of an assistant turn must be text, got {type(content).__name__}")
    return content
