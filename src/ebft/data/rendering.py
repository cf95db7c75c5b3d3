"""Chats as text, rendered with a tokenizer's chat template, and what the template writes after a reply."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from ebft.data import tokens
from ebft.data.messages import Message
from ebft.errors import DataError, cause

_REPLY = "EBFT-REPLY-EBFT"  # placeholder for a reply, to find the text that the template writes after it
_ASKED = {"role": "user", "content": "?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "ebft_tool", "arguments": {"a": "b"}}}
_RESULT = {"role": "tool", "tool_call_id": _CALL["id"], "name": "ebft_tool", "content": "?"}


class ChatTemplate:
    """Renders chats with a tokenizer's chat template; `kwargs` and the descriptions of `tools` are its arguments.

    `name` is for messages. With `closed`, a chat that ends with a reply, after which the template
    writes nothing, is followed by the special token with which the next turn would start: models of such templates end
    a reply with it (`<|user|>` of GLM), and TRL's training templates write it too.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str | None = None,
        kwargs: dict[str, Any] | None = None,
        tools: list[Any] | None = None,
        closed: bool = True,
    ) -> None:
        self.tokenizer, self.name, self.tools, self.closed = tokenizer, name or "of the tokenizer", tools, closed
        self.kwargs: dict[str, Any] = dict(kwargs or {})
        self.places: dict[tuple[str, ...], tuple[int, int, int]] = {}  # see `ebft.data.turns.Places`
        unread = [key for key in self.kwargs if key not in str(tokenizer.chat_template)]
        if unread and tokenizer.chat_template is not None:
            warnings.warn(
                f"chat_template_kwargs: chat template {self.name} does not contain {', '.join(unread)}, so it has no "
                "effect. Correct its name, or remove it.",
                stacklevel=3,
            )

    def __call__(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """The text of a chat. Raises DataError if the template cannot render it.

        Messages are passed as the template reads them: contents as text or as a list of parts, thinking under the key
        that it knows, arguments of tool calls as an object or as JSON text, and the content of turns that only call
        tools as an empty text, or as None if the template would omit the calls otherwise.
        """
        text = self._apply([self._readable(message) for message in messages], add_generation_prompt)
        if not self.closed or add_generation_prompt or not messages or messages[-1].get("role") != "assistant":
            return text
        return text + self.next_turn[bool(messages[-1].get("tool_calls"))]

    def with_tools(self, tools: list[Any] | None, kwargs: dict[str, Any] | None = None) -> ChatTemplate:
        """The same template for a row with descriptions of tools and arguments of its own."""
        if not tools and not kwargs:
            return self
        return ChatTemplate(self.tokenizer, self.name, self.kwargs | (kwargs or {}), tools or self.tools, self.closed)

    @cached_property
    def thinking_keys(self) -> list[str]:
        """The keys of an assistant turn with thinking that the template renders; content: as a part of it."""
        example = {"role": "assistant", "content": "?"}
        found = [key for key in tokens.THINKING if _REPLY in self._text([_ASKED, {**example, key: _REPLY}])]
        text = self._text([_ASKED, {**example, "content": _in_parts(_REPLY, "?")}])
        return found or ["content"] * (_REPLY in text and not re.search("['\"]type['\"]", text))  # a list as text

    @cached_property
    def opened_thinking(self) -> str:
        """What the template writes where a reply starts, if it opens a thinking block, else an empty text."""
        given, asked = self._text([_ASKED]), self._text([_ASKED], add_generation_prompt=True)
        opened = asked[len(commonprefix([given, asked])) :]
        return opened if tokens.TAG.search(opened) else ""

    @cached_property
    def special(self) -> list[str]:
        """The texts of the tokenizer's special tokens."""
        return tokens.special_texts(self.tokenizer)

    @cached_property
    def end_of_turn(self) -> str:
        """The text that the template writes after the last reply, empty if there is none or if it is unknown."""
        if self.tokenizer.chat_template is None:
            return ""
        try:
            return self.after_reply([_ASKED], [])
        except DataError:  # the end of turn of a template that does not accept such a chat is unknown
            return ""

    @cached_property
    def end_ids(self) -> set[int]:
        """Tokens that end a reply: end of sequence, and the end of turn if it is a special token."""
        return {self.tokenizer.eos_token_id, self.end_of_turn_id} - {None}

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The special or added token that ends a reply, None if there is none.

        It is the last one that the template writes both after the last reply and after one that is followed by a user
        turn: some templates close the content first (`<|END_RESPONSE|>` of Cohere), or end a chat with another token.
        """
        known = tokens.end_tokens(self.tokenizer)
        ids = tokens.ids_after(self.tokenizer, "", self.end_of_turn)
        try:
            following = tokens.ids_after(self.tokenizer, "", self.after_reply([_ASKED], [_ASKED])) if ids else []
        except DataError:
            following = []
        ends = [token for token in commonprefix([ids, following]) if token in known]
        return ends[-1] if ends else ids[0] if ids and ids[0] in known else None

    def after_reply(self, before: list[Message], after: list[Message], add_generation_prompt: bool = False) -> str:
        """What the template writes after a reply to the messages `before`, with the messages `after` following it."""
        reply = _REPLY
        while any(reply in str(message) for message in (*before, *after)):
            reply += "-EBFT"
        text = self([*before, {"role": "assistant", "content": reply}, *after], add_generation_prompt)
        if reply not in text:
            raise DataError("the chat template omits an assistant turn, so turns cannot be separated")
        return text.rpartition(reply)[2]

    @cached_property
    def next_turn(self) -> dict[bool, str]:
        """The special token that starts the turn after a reply without and with tool calls, if nothing ends replies."""
        reply = {"role": "assistant", "content": _REPLY}
        calls = {**reply, "tool_calls": [_CALL]}
        if not self._text([_ASKED, reply]).endswith(_REPLY):
            return {False: "", True: ""}
        return {False: self._start_of(reply, _ASKED), True: self._start_of(calls, _RESULT)}

    @cached_property
    def _reads_only_parts(self) -> bool:
        """Whether the template omits contents that are texts, and not lists of parts."""
        shows = lambda content: _REPLY in self._text([{"role": "user", "content": content}])
        return not shows(_REPLY) and shows([{"type": "text", "text": _REPLY}])

    @cached_property
    def _reads_objects(self) -> bool:
        """Whether the template writes the result of a tool that is an object as JSON."""
        calls = self._readable({"role": "assistant", "content": "", "tool_calls": [_CALL]})
        return f'"{_REPLY}"' in self._text([_ASKED, calls, {**_RESULT, "content": {_REPLY: _REPLY}}])

    @cached_property
    def _doubles_thinking(self) -> bool:
        """Whether the template writes an empty thinking block before the one in a content."""
        if not self.thinking_keys:
            return False
        apart = {"role": "assistant", "content": "?", self.thinking_keys[0]: _REPLY}
        joined = {"role": "assistant", "content": tokens.join_thinking(_REPLY, "?")}
        apart, joined = (self._text([_ASKED, message]).count("<think>") for message in (apart, joined))
        return joined > apart > 0

    def _with_thinking(self, message: Message) -> Message:
        """The message with its thinking in a key that the template reads, if there is one."""
        given = next((key for key in tokens.THINKING if message.get(key)), None)
        content = message.get("content")
        if given is not None and self.thinking_keys and given not in self.thinking_keys:
            key, rest = self.thinking_keys[0], {key: value for key, value in message.items() if key != given}
            return {**rest, key: _in_parts(message[given], content) if key == "content" else message[given]}
        spans = tokens.thinking_spans(content) if given is None and isinstance(content, str) else []
        starts = len(spans) == 1 and not content[: spans[0][0]].strip() and content.lstrip().startswith("<think")
        if starts and self._doubles_thinking:
            thinking, answer = tokens.split_thinking(content)
            return {**message, "content": answer, self.thinking_keys[0]: thinking}
        return message

    def _readable(self, message: Message) -> Message:
        """The message as the template reads it."""
        content = message.get("content")
        if isinstance(content, str) and self._reads_only_parts:
            message = {**message, "content": [{"type": "text", "text": content}]}
        elif isinstance(content, Mapping) and not self._reads_objects:
            message = {**message, "content": _as_text(content)}
        if message.get("role") == "assistant":
            message = self._with_thinking(message)
        if not isinstance(message.get("tool_calls"), list):
            return message
        read, no_content = self._reads_calls
        calls = [read(call) for call in message["tool_calls"]]
        content = message.get("content") or no_content
        return {**message, "content": content, "tool_calls": calls}

    @cached_property
    def _reads_calls(self) -> tuple[Callable[[Any], Any], str | None]:
        """How the template reads calls, and the content of turns that only call tools."""
        for is_flat in (False, True):  # a few templates read calls without the level of the function
            for convert in (_as_object, _as_text):
                read = partial(_as_read, convert, is_flat)
                for content in ("", None):
                    calls = [read(_CALL)]
                    text = self._text([_ASKED, {"role": "assistant", "content": content, "tool_calls": calls}])
                    if _CALL["function"]["name"] in text and "'a'" not in text:  # Python's text of an object
                        return read, content
        return (lambda call: call), ""

    def _start_of(self, reply: Message, message: Message) -> str:
        done, text = self._text([_ASKED, reply]), self._text([_ASKED, reply, message])
        start = text[len(done) :].lstrip() if done and text.startswith(done) else ""
        return max((token for token in self.special if token and start.startswith(token)), key=len, default="")

    def _text(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """The text of an example, empty if the template refuses it."""
        try:
            return self._apply(messages, add_generation_prompt)
        except DataError:
            return ""

    def _apply(self, messages: list[Message], add_generation_prompt: bool) -> str:
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, but the row has messages. Set chat_template (chatml, llama3, or "
                "for tools a Jinja file), or a type of text, such as ebft_strided_structured.transform for pairs"
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.kwargs,
            )
        except Exception as error:  # a template is a program, which can divide by zero or call itself without end
            raise DataError(f"chat template {self.name} cannot render these messages: {cause(error)}") from error


def _as_read(convert: Callable[[Any], Any], is_flat: bool, call: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(function := call.get("function"), Mapping):
        return call
    function = {**function, **({"arguments": convert(function["arguments"])} if "arguments" in function else {})}
    rest = {key: call[key] for key in call if key != "function"}
    return rest | function if is_flat else {**call, "function": function}


def _in_parts(thinking: str, content: Any) -> list[Any]:
    rest = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return [{"type": "thinking", "thinking": thinking}, *rest]


def _as_object(arguments: Any) -> Any:
    """The value of arguments that are JSON text, as OpenAI's format has them."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, Mapping) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


# <|im_start|>, <｜User｜>, <|turn>, <turn|>, <start_of_turn>, <s>, [INST]. Words in brackets, as <think>, are text.
_MARKER = re.compile(r"<[|｜][^>\s]+>|<[^<\s]+[|｜]>|</?[A-Za-z]+_[A-Za-z_]+>|</?s>|\[/?(?:INST|[A-Z]+_[A-Z_]+)\]")
# Llama 2 and Mistral v1 write [INST] as text, with a space before the closing one; others have tokens for it.
_AS_TEXT = " [/INST]"
_USER, _MARKED_REPLY = ({"role": role, "content": f"A {role}"} for role in ("user", "assistant"))
_SYSTEM = {"role": "system", "content": "A system"}
_MARKED_QUESTION = ([_USER], [_USER, _MARKED_REPLY, _USER], [_SYSTEM, _USER], [_SYSTEM, _USER, _MARKED_REPLY, _USER])
# Some templates end a finished chat with another token.
_CHATS = (*_MARKED_QUESTION, *([*chat, _MARKED_REPLY] for chat in _MARKED_QUESTION))


def rendered_examples(tokenizer: PreTrainedTokenizerBase, template: str | dict) -> list[str | None]:
    """Small chats, with the start of a reply if they end with a question; None for those that the template refuses."""
    found: list[str | None] = []
    for chat in _CHATS:
        options = {"tokenize": False, "add_generation_prompt": chat[-1] is not _MARKED_REPLY}
        try:
            found.append(tokenizer.apply_chat_template(chat, chat_template=template, **options))
        except Exception:  # a template is a program, which may fail in any way
            found.append(None)
    return found


def split_markers(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The markers in `text` that the tokenizer splits into several tokens, or does not know."""
    split, unknown = [], tokenizer.unk_token_id
    for marker in dict.fromkeys(_MARKER.findall(text)):
        ids = tokenizer(marker, add_special_tokens=False, verbose=False)["input_ids"]
        own = tokenizer.convert_tokens_to_ids(marker)  # may follow a space that the tokenizer adds
        is_token = own in ids and (own != unknown or marker == tokenizer.unk_token)
        is_token = is_token or (len(ids) == 1 and ids[0] != unknown)
        split += [] if is_token or (marker.startswith("[") and _AS_TEXT in text) else [marker]
    return split


def split_by_template(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The markers that the tokenizer's chat template writes, and that the tokenizer splits."""
    if tokenizer.chat_template is None:
        return []
    texts = rendered_examples(tokenizer, tokenizer.chat_template)
    return split_markers(tokenizer, "\n".join(filter(None, texts)))


def warn_of_split_markers(what: str, markers: list[str]) -> None:
    """One warning that `what` writes `markers`, with the keys that add them to the vocabulary."""
    if not markers:
        return
    quoted = ", ".join(f'"{marker}"' for marker in markers)
    warnings.warn(
        f"{what} writes {', '.join(markers)}, which the vocabulary lacks, so each is split into several tokens. Add "
        f"them: tokens: [{quoted}], or special_tokens.additional_special_tokens; with an adapter also "
        "lora_modules_to_save: [embed_tokens, lm_head], so that they are trained.",
        stacklevel=3,
    )
