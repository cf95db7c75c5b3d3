"""Random conversations: every text that the user wrote is in the tokens of the row, or loading reports it."""

import json
import random
import warnings

import pytest

from ebft.errors import DataError
from tests.data.rendering.expected import Chat, tokenizer_of
from tests.data.rendering.rows import SETTINGS, Dropped, loaded, raw_row

TEMPLATES = (
    "trl/qwen3",
    "trl/qwen3_6",
    "trl/gptoss",
    "trl/glm4moe",
    "trl/gemma3",
    "trl/deepseek_r1_distill",
    "trl/llama3_1",
    "trl/phi3",
    "trl/cohere2",
    "ebft/chatml",
    "ebft/mistral_v2v3+space",
)
METHODS = [method for method in SETTINGS if method != "opencode"]
COUNT = 200


class Writer:
    """Writes a random conversation of words that occur once, which it remembers."""

    def __init__(self, seed):
        self.random, self.words, self.tool_words = random.Random(seed), [], []
        self.prefix = f"w{seed}x"

    def word(self, words=None):
        words = self.words if words is None else words
        words.append(f"{self.prefix}{len(self.words) + len(self.tool_words)}z")
        return words[-1]

    def text(self):
        return self.random.choice(("{}", "{} é 七", "About {}.\n\nWell", "  {}\n")).format(self.word())

    def chance(self, share):
        return self.random.random() < share

    def chat(self):
        """Messages that end with a reply, and descriptions of tools."""
        messages, tools = [], None
        if self.chance(0.3):
            role = "developer" if self.chance(0.3) else "system"
            messages.append({"role": role, "content": self.text()})
        if self.chance(0.4):
            tools = [self.tool()]
        for _ in range(self.random.randint(1, 3)):
            asked = self.text()
            asked = [{"type": "text", "text": asked}] if self.chance(0.1) else asked
            messages.append({"role": "user", "content": asked})
            if tools and self.chance(0.5):
                messages += self.call()
            messages.append({"role": "assistant", "content": self.text()})
        return self.with_thinking(messages), tools

    def with_thinking(self, messages):
        """Thinking in the last turn, in one of the places in which data has it."""
        last = messages[-1]
        if self.chance(0.5):
            key = self.random.choice(("content", "reasoning_content", "thinking"))
            thought = self.text()
            last[key] = f"<think>\n{thought}\n</think>\n\n{last['content']}" if key == "content" else thought
        return messages

    def call(self):
        name = self.word()
        value = self.random.choice((lambda: self.word(), lambda: [self.word(), 2], lambda: {self.word(): None}))
        arguments = {name: value()}
        given = json.dumps(arguments) if self.chance(0.4) else arguments
        function = {"name": self.word(), "arguments": given}
        calls = [{"type": "function", "id": "call00001", "function": function}]
        content = self.random.choice(("", None, "text"))
        turn = {"role": "assistant", "content": self.text() if content == "text" else content, "tool_calls": calls}
        result = {"role": "tool", "content": self.text(), "tool_call_id": "call00001", "name": function["name"]}
        return [turn, result]

    def tool(self):
        word = lambda: self.word(self.tool_words)
        properties = {word(): {"type": "string", "description": word()}}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": "search", "description": word(), "parameters": parameters}
        return {"type": "function", "function": function}

    def sharegpt(self):
        """A row in ShareGPT's format of tools: calls and results are messages of their own."""
        call = {"name": self.word(), "arguments": {self.word(): self.word()}}
        turns = [("human", self.text()), ("function_call", json.dumps(call)), ("observation", self.text())]
        turns.append(("gpt", self.text()))
        return {
            "conversations": [{"from": role, "value": text} for role, text in turns],
            "tools": json.dumps([self.tool()["function"]]),
        }


def missing_words(seed):
    """The method and template of a random row, and what is neither in its tokens nor reported."""
    writer = Writer(seed)
    method, name = writer.random.choice(METHODS), writer.random.choice(TEMPLATES)
    if writer.chance(0.15) and method in ("strided", "sft", "last_turn", "reasoning", "multiturn"):
        kind, raw = "sharegpt", writer.sharegpt()
    else:
        messages, tools = writer.chat()
        kind, raw = describe(messages, tools), raw_row(method, Chat(messages, tools))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = loaded(method, name, raw)
        except DataError:
            return method, name, kind, []
    if isinstance(found, Dropped):
        return method, name, kind, []
    warned = " ".join(str(warning.message) for warning in caught)
    if "leaves out the text of turns that also call tools" in warned:  # with the first of them as an example
        warned += " ".join(str(message["content"]) for message in messages if message.get("tool_calls"))
    texts = [tokenizer_of(name).decode(one.ids) for one in found]
    lost = [word for word in writer.words if word not in warned and not all(word in text for text in texts)]
    if "tool" not in warned:
        lost += [f"{word} (of a tool)" for word in writer.tool_words if not all(word in text for text in texts)]
    return method, name, kind, lost


def describe(messages, tools):
    """The kinds of texts in a conversation, for messages."""
    last = messages[-1]
    parts = ["developer"] * (messages[0]["role"] == "developer") + ["tools"] * bool(tools)
    parts += [key for key in ("reasoning_content", "thinking") if key in last]
    parts += ["<think>"] * ("<think>" in str(last["content"]))
    parts += ["calls"] * any(message.get("tool_calls") for message in messages)
    parts += ["parts"] * any(isinstance(message["content"], list) for message in messages)
    return "+".join(parts) or "plain"


@pytest.mark.parametrize("first", range(0, COUNT, 20))
def test_nothing_is_lost(first):
    found = [missing_words(seed) for seed in range(first, first + 20)]
    lost = [f"{method} {name} {kind}: {', '.join(words)}" for method, name, kind, words in found if words]
    assert not lost, "\n".join(["", *lost])


def test_most_conversations_are_loaded():
    """The property is about rows, not only about errors."""
    plain = [missing_words(seed) for seed in range(COUNT)]
    assert len({(method, name) for method, name, _, _ in plain}) > 60
