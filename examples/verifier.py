"""A verifiable reward for grpo_verifier.yaml: whether a completion's Python code parses."""

import ast
import re
from typing import Any

_FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def parses(completions: list[Any], **columns: Any) -> list[float]:
    """1 for each completion whose code is valid Python, else 0; code is what stands in fences, or all of the text."""
    return [float(_is_python(_text(completion))) for completion in completions]


def _text(completion: Any) -> str:
    """A completion is a text, or the messages of a chat, of which the last is the answer."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _is_python(text: str) -> bool:
    blocks = _FENCED.findall(text) or [text]
    try:
        return bool(ast.parse("\n".join(blocks)).body)
    except (SyntaxError, ValueError):
        return False
