"""The text around prompts and completions of the formats `chatml.*` and `llama3.*`, which use no chat template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """The parts of a chat with one question; `{}` is replaced with the text."""

    system: str
    user: str  # up to the start of the answer
    end: str

    def prompt(self, user: str, system: str) -> str:
        """The text before the answer; empty if there is no question."""
        if not user.strip():
            return ""
        return (self.system.format(system) if system.strip() else "") + self.user.format(user)

    def completion(self, text: str) -> str:
        """An answer with its end; empty if it says nothing."""
        return text + self.end if text.strip() else ""


STYLES = {
    "chatml": Style(
        "<|im_start|>system\n{}<|im_end|>\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "llama3": Style(
        "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
}
