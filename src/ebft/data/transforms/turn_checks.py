"""Checks that a chat template renders the texts of messages and the ends of turns."""

import warnings

from ebft.data.messages import Message
from ebft.data.thinking import split_thinking
from ebft.data.transforms.omissions import Omissions
from ebft.data.transforms.turn_labels import Part
from ebft.data.transforms.turn_places import Places


class TurnChecks:
    """Raises DataError for texts that the template omits, and warns once of ends of turns that it omits."""

    def __init__(self, template: str, with_ends: bool) -> None:
        self.template, self.with_ends = template, with_ends
        self.omissions = Omissions(template)
        self._warned = False

    def check(self, found: Places, parts: list[Part]) -> None:
        """Check the ends of the parts of a chat that are trained on."""
        for part in parts:
            if part.turn is not None:
                self._check_end(found.messages[part.turn], part.text)

    def _check_end(self, message: Message, text: str) -> None:
        calls, answer = message.get("tool_calls"), _answer(message)
        ends = not answer or calls or not text.rstrip().endswith(answer)
        if message["role"] == "assistant" and self.with_ends and not ends and not self._warned:
            self._warned = True
            warnings.warn(
                f"chat template {self.template} writes nothing after a reply, so the model does not learn where to "
                "stop. Use a chat_template that ends turns.",
                stacklevel=2,
            )


def _answer(message: Message) -> str:
    content = message.get("content")
    return split_thinking(content)[1].strip() if isinstance(content, str) else ""
