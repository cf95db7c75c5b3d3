"""Python source files, the documented functions in them, and pieces of them.

A function is a row {input, output, name, file, module, has_doctest}. Its `input` is its signature and docstring and
ends with the closing quotes: the newline behind them belongs to `output`, because a byte-level BPE joins it with the
indentation of the next line, and a prompt that ends in a newline alone is text that no model has seen.
"""

import ast
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import sources
import verifiers
from verifiers import function_of, function_text

from ebft.tools.quickstart.tiny import number_of, standard_library

Count = Callable[[str], int]  # tokens of a text

STANDARD = "stdlib/"
FILES_OF_A_PACKAGE = 300
PATIENCE = 10  # seconds of CPU for a doctest, so that no busy machine decides what the data are
LONGEST = 4000  # characters of a function, with its docstring
# Bodies of functions that do nothing: a doctest that one of them passes decides nothing.
NOTHING_DONE = ("\n    return None\n", "\n    raise NotImplementedError\n")


def python_files(max_files: int | None = None) -> dict[str, str]:
    """Name -> text of the standard library's files and, unless `max_files` limits those, of the installed packages."""
    library = {f"{STANDARD}{file}": text for file, text in standard_library(max_files).items()}
    if max_files is not None:
        return library
    packages = {}
    for name in sources.PACKAGES:
        files = sources.package_files(name)
        chosen = sorted(files, key=number_of)[:FILES_OF_A_PACKAGE]
        packages |= {file: files[file] for file in chosen}
    return library | packages


def functions(file: str, text: str) -> Iterator[dict[str, Any]]:
    """The documented functions and methods of a source file that can be completed alone, without indentation."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except SyntaxError:  # templates of code
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node, clean=False):
            split = split_function(node, lines)
            if split is not None and "".join(split).isascii():
                names = {"name": node.name, "file": file, "module": module_of(file)}
                yield {"input": split[0], "output": split[1], **names, "has_doctest": False}


def split_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    """Signature with docstring, and body; None for a function that is empty or cannot be taken out."""
    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    if len(text) > LONGEST:
        return None
    head = node.body[0].end_lineno - node.lineno + 1
    kept = text.split("\n")
    prompt, body = "\n".join(kept[:head]).rstrip(), "\n" + "\n".join(kept[head:]).rstrip() + "\n"
    # The same function must come out of prompt and completion: lines of a text in column 0 would end it early.
    if not body.strip() or function_text(prompt, body) != prompt + body:
        return None
    found = function_of(prompt, body)
    if found is None or len(found.body) != len(node.body) or verifiers.is_trivial(found):
        return None
    return prompt, body


def body_key(function: dict[str, Any]) -> str:
    """The same text for bodies that differ in layout, comments or texts alone: what counts as a copy."""
    tree = function_of(function["input"], function["output"])
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return "\n".join(ast.unparse(statement) for statement in tree.body[1:])


def has_doctest(function: dict[str, Any]) -> bool:
    """Whether the function's own doctest decides anything: it passes, and functions that do nothing do not.

    The doctest of a method calls the class of its module, and so passes whatever is completed. Only functions of the
    standard library are tried, whose modules are quick to import.
    """
    if ">>>" not in function["input"] or not function["file"].startswith(STANDARD):
        return False
    passes = lambda body: verifiers.examples_pass(function["input"], body, function["module"], PATIENCE)
    return passes(function["output"]) and not any(map(passes, NOTHING_DONE))


def module_of(file: str) -> str:
    """The name under which a file is imported."""
    return file.removeprefix(STANDARD).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def pieces(file: str, text: str, tokens: int, count: Count) -> Iterator[dict[str, str]]:
    """Runs of whole lines of a file, each the longest of at most `tokens` tokens, and none much shorter."""
    piece, length = [], 0
    for line in text.splitlines(keepends=True):
        own = count(line)
        if length + own > tokens:
            if length > tokens * 0.75:
                yield {"text": "".join(piece), "file": file}
            piece, length = [], 0
        if own <= tokens:
            piece.append(line)
            length += own
