"""Verifiable rewards for grpo_verifier.yaml and gdpo.yaml: whether Python code parses, and is documented."""

import ast
import re
from typing import Any

_FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def parses(completions: list[Any], **columns: Any) -> list[float]:
    """1 for each completion whose code is valid Python, else 0; code is what stands in fences, or all of the text."""
    return [float(_is_python(_text(completion))) for completion in completions]


def documented(completions: list[Any], **columns: Any) -> list[float]:
    """The fraction of the functions of each completion that have a docstring; 0 without functions."""
    return [_documented(_text(completion)) for completion in completions]


def _documented(text: str) -> float:
    functions = [node for node in ast.walk(_tree(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(ast.get_docstring(node) is not None for node in functions) / max(len(functions), 1)


def _text(completion: Any) -> str:
    """A completion is a text, or the messages of a chat, of which the last is the answer."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _is_python(text: str) -> bool:
    return bool(_tree(text).body)


def _tree(text: str) -> ast.Module:
    """The code of a completion, empty if it does not parse."""
    blocks = _FENCED.findall(text) or [text]
    try:
        return ast.parse("\n".join(blocks))
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
