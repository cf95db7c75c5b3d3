"""Prompts, replies and the text between them as token ids: one way to tokenise, for sampling and for features alike.

A prompt is a text or a list of messages. A conversation goes on with `remaining_turns`, the messages after the first
reply: user turns that are given, and assistant turns that are references. Replies are never rendered by the chat
template together with what follows; their own ids are kept, and the template gives only the ids between two replies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ebft.errors import DataError

Message = dict[str, Any]
Prompt = str | list[Message]

REMEMBERED = 1024  # conversations, so that rollouts, reward and cross-entropy of a batch share one rendering
_REPLY = "EBFT-REPLY-EBFT"  # stands in for a reply, to find where the template puts what follows it


@dataclass(frozen=True)
class Turn:
    """One reply of a conversation: the ids that lead up to it (after the reply before it), and its reference."""

    lead_ids: list[int]
    reference: str
    reference_ids: list[int]


@dataclass(frozen=True)
class Conversation:
    """A prompt and the turns that follow; `turns[0].lead_ids` are the prompt's own ids."""

    turns: list[Turn]

    @property
    def prompt_ids(self) -> list[int]:
        return self.turns[0].lead_ids

    @property
    def reference_ids(self) -> list[int]:
        """The whole reference conversation after the prompt, user turns included, no end-of-turn token at its end."""
        ids = list(self.turns[0].reference_ids)
        for turn in self.turns[1:]:
            ids += [*turn.lead_ids, *turn.reference_ids]
        return ids


class Renderer:
    """Turns prompts, references and conversations into token ids with one tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.kwargs = dict(chat_template_kwargs or {})
        self._rendered: dict[str, Conversation] = {}

    def conversation(
        self, prompt: Prompt, ground_truth: str, remaining_turns: Iterable[Message] | None = None
    ) -> Conversation:
        """The prompt with its references. DataError where a message or the chat template does not allow it.

        The last `REMEMBERED` conversations are kept, so that one is rendered once for everything that a step does.
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
        turns = [Turn(self.prompt_ids(prompt), ground_truth, self.reference_ids(ground_truth))]
        between: list[Message] = []
        for message in _clean(remaining_turns):
            if message.get("role") != "assistant":
                between.append(message)
                continue
            if not between:
                raise DataError("remaining_turns has two assistant turns in a row: a user turn must stand between them")
            reference = _text(message.get("content"))
            turns.append(Turn(self.gap_ids(prompt, between), reference, self.reference_ids(reference)))
            between = []
        return Conversation(turns)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Ids of a text with the tokenizer's special tokens, or of messages with the generation prompt."""
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt, verbose=False)["input_ids"]
            eos = self.tokenizer.eos_token_id
            if len(ids) > 1 and ids[-1] == eos and not prompt.endswith(self.tokenizer.eos_token):
                ids = ids[:-1]  # some tokenizers end every text with EOS, and a prompt goes on
        elif prompt and prompt[-1].get("role") == "assistant":
            raise DataError(
                "a prompt must not end with an assistant message: the policy is asked for a new reply, and would not "
                "go on with that one. End it with a user message, and put the reply into ground_truth"
            )
        else:
            ids = self._apply(_clean(prompt), tokenize=True)["input_ids"]
        if not ids:
            raise DataError(
                "an empty prompt has no token to sample from. Give a prompt, or a tokenizer with a BOS token"
            )
        return list(ids)

    def reference_ids(self, text: str) -> list[int]:
        """Ids of a reference, without special tokens and without a terminating end-of-turn token."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return without_end(list(ids), self.end_ids())

    def gap_ids(self, prompt: Prompt, messages: list[Message]) -> list[int]:
        """Ids between a reply and the next one: its end-of-turn token, `messages`, the generation prompt."""
        if isinstance(prompt, str):
            raise DataError("remaining_turns needs a prompt of messages, since the chat template joins the turns")
        text = self._after_reply([*_clean(prompt), {"role": "assistant", "content": _REPLY}, *messages], True)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def end_id(self, prompt: Prompt) -> int | None:
        """The token that ends a reply to `prompt`: of the chat template for messages, else the end of sequence."""
        end_of_turn = None if isinstance(prompt, str) else self._end_of_turn
        return self.tokenizer.eos_token_id if end_of_turn is None else end_of_turn

    def end_ids(self) -> set[int]:
        """Tokens that end a reply: end of sequence, and the chat template's end of turn where it is a special token."""
        return {self.tokenizer.eos_token_id, self._end_of_turn} - {None}

    @cached_property
    def _end_of_turn(self) -> int | None:
        if self.tokenizer.chat_template is None:
            return None
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
        try:
            text = self._after_reply(chat, False)
        except DataError:  # a template that takes no such chat has no end of turn to tell
            return None
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        return ids[0] if ids and ids[0] in special else None

    def _after_reply(self, messages: list[Message], add_generation_prompt: bool) -> str:
        text = self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        if _REPLY not in text:
            raise DataError("the chat template leaves out an assistant turn, so turns cannot be told apart")
        return text.rpartition(_REPLY)[2]

    def _apply(self, messages: list[Message], tokenize: bool, add_generation_prompt: bool = True) -> Any:
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template and the prompt is a list of messages. Set chat_template (chatml, "
                "llama3, or your own Jinja text), or give prompts as text"
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


def without_end(ids: list[int], end_ids: set[int]) -> list[int]:
    """`ids` without a terminating end token, of which at most one is taken off."""
    return ids[:-1] if ids and ids[-1] in end_ids else ids


def end_length(lead_ids: list[int], end_ids: Collection[int]) -> int:
    """How many ids at the start of what leads to a reply end the reply before it: up to its end token, 0 without."""
    return next((index + 1 for index, token in enumerate(lead_ids) if token in end_ids), 0)


def _clean(messages: Iterable[Message]) -> list[Message]:
    """Messages without keys that are None: Arrow gives every message the keys of all, and templates test for them."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise DataError(f"the content of an assistant turn must be text, it is {type(content).__name__}")
    return content
