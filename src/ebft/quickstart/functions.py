"""Documented Python functions as prompt/completion rows: signature and docstring, and the body that follows them.

A prompt ends with the closing quotes of the docstring. The line break after them belongs to the body: a byte-level BPE
joins it with the indentation of the next line, and a prompt that ends in a line break alone is text that no model was
trained on.
"""

import ast
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Function:
    """A documented function without its indentation: text up to the docstring's end, the rest, and its origin."""

    input: str
    output: str
    name: str
    file: str

    @property
    def has_examples(self) -> bool:
        """Whether the docstring shows an interactive session, which often is a doctest."""
        return ">>>" in self.input


def functions(texts: Mapping[str, str], longest_input: int = 300, longest_output: int = 200) -> Iterator[Function]:
    """The documented functions and methods of source files `{name: text}`, in the order of the files.

    Yields those of at most `longest_input` characters of signature and docstring and `longest_output` characters of
    body. A function is left out where prompt and body together would not be read as the same function again.
    """
    for file, text in texts.items():
        with warnings.catch_warnings(action="ignore"):  # invalid escapes, which are not errors
            tree = ast.parse(text)
        lines = text.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
                prompt, body = split_function(node, lines)
                fits = len(prompt) <= longest_input and len(body) <= longest_output
                if fits and is_whole(prompt, body, len(node.body)):
                    yield Function(prompt, body, node.name, file)


def split_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str]:
    """Signature with docstring, and body, of a documented function in a file with these `lines`."""
    kept = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).split("\n")
    head = node.body[0].end_lineno - node.lineno + 1
    return "\n".join(kept[:head]).rstrip(), "\n" + "\n".join(kept[head:]).rstrip() + "\n"


def is_whole(prompt: str, body: str, statements: int) -> bool:
    """Whether the two parts are one function of so many statements, docstring included.

    They are not where a line of a multi-line string starts in column 0, which ends a completed function early, or
    where code follows the docstring on its own line.
    """
    found = function_of(prompt, body)
    return found is not None and function_text(prompt, body) == prompt + body and len(found.body) == statements


def function_text(prompt: str, completion: str) -> str:
    """Prompt and completion up to the function's end: the first line after the prompt that is not indented.

    The stop sequences of HumanEval end a function at the same place.
    """
    return prompt + until_function_end(completion) + "\n"


def until_function_end(completion: str) -> str:
    """The part of a completion that belongs to the prompt's function, without white space at its end."""
    first, *lines = completion.split("\n")
    kept = [first]
    for line in lines:
        if line and not line[0].isspace():
            break
        kept.append(line)
    return "\n".join(kept).rstrip()


def function_of(prompt: str, completion: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The completed function; None where it is not valid Python, or has no statement after its docstring."""
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(function_text(prompt, completion)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(body) != 1 or not isinstance(body[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    function = body[0]
    return function if len(function.body) > 1 and ast.get_docstring(function) is not None else None


def within_tokens(
    found: Iterable[Function], tokenizer: Any, longest_input: int, output: tuple[int, int]
) -> Iterator[Function]:
    """The functions with at most `longest_input` tokens of prompt, and of body at least and at most `output` tokens."""
    for function in found:
        prompt, body = (len(tokenizer(text).input_ids) for text in (function.input, function.output))
        if prompt <= longest_input and output[0] <= body <= output[1]:
            yield function


def unique(found: Iterable[Function], seen: set[str]) -> Iterator[Function]:
    """The functions whose body is not in `seen`, which each of them joins.

    Bodies, and not whole functions: overloads and subclasses repeat a body under another docstring.
    """
    for function in found:
        if function.output not in seen:
            seen.add(function.output)
            yield function
