"""The data: source files of Python's standard library, split by file, and the documented functions in them.

Writes pretrain.jsonl with rows {text, file}, whole files; and for each task TASK_train.jsonl, TASK_validation.jsonl, on
which learning rates are chosen, and TASK_test.jsonl, on which models are measured. Rows of the task raw are pieces of
files {text, file}; those of the task functions are {input, output, name, file, module, has_doctest}. A function's
`input` is its signature and docstring and ends with the closing quotes: the newline behind them belongs to `output`,
because a byte-level BPE joins it with the indentation of the next line, and a prompt that ends in a newline alone is
text that no base model has seen. Neither a file nor a documented function's text is in two parts.
"""

import ast
import json
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import project  # noqa: F401 (makes the quickstart importable)
import verifiers
from cells import TASKS
from quickstart.corpus import part_of, standard_library
from quickstart.phases import console
from sizes import Size

PARTS = {"pretrain": 45, "train": 25, "validation": 8, "test": 22}  # in percent of the files
LONGEST = (300, 200)  # characters of input and output: some 90 and 60 tokens
LONGEST_WITH_EXAMPLES = (600, 300)  # functions with a doctest are few, and their docstrings long
SHORTEST = 35  # characters of output: shorter ones have no room for a block, and EBFT would train on fewer rows
# Functions of one file, so that no large one stands for all: of those trained on, and of those measured.
MOST_OF_A_FILE = {"train": 40, "validation": 4, "test": 3}
# Bodies of functions that do nothing: a doctest that one of them passes decides nothing.
NOTHING_DONE = ("\n    return None\n", "\n    raise NotImplementedError\n")


@dataclass
class Function:
    """A documented function: its text up to the docstring's end, the rest of it, and where it is from."""

    input: str
    output: str
    name: str
    file: str
    module: str  # whose names its doctest may use
    has_doctest: bool = False


def write_corpus(folder: Path, size: Size) -> None:
    """Write the files, with as many rows as `size` says. Raises ValueError where there is no library."""
    library = standard_library(size.max_files)
    parts: dict[str, dict[str, str]] = {part: {} for part in PARTS}
    for file, text in library.items():
        parts[part_of(file, PARTS)][file] = text
    rows = {"pretrain": raw(parts["pretrain"])}
    seen = {function.input + function.output for function in functions(parts["pretrain"])}
    for part in ("test", "validation", "train"):
        found = [function for function in unique(functions(parts[part]), seen) if len(function.output) >= SHORTEST]
        for function in found:
            function.has_doctest = ">>>" in function.input and decides(function)
        measured, most = part != "train", MOST_OF_A_FILE[part]
        kept = chosen(found, size.documents, most) if measured else capped(found, most)
        rows[f"functions_{part}"] = [asdict(function) for function in kept]
        rows[f"raw_{part}"] = pieces(parts[part], size.piece, size.documents if measured else size.raw_rows)
    for name, part in rows.items():
        write_rows(folder / f"{name}.jsonl", part)
    console.print(", ".join(f"{name}: {len(part)}" for name, part in rows.items()))


def count_rows(folder: Path) -> dict[str, int]:
    """Rows of each file."""
    return {path.stem: len(read_rows(path)) for path in sorted(folder.glob("*.jsonl"))}


def sources(folder: Path) -> dict[str, list[str]]:
    """For each task the library's file that each test document is from."""
    return {task: [row["file"] for row in read_rows(folder / f"{task}_test.jsonl")] for task in TASKS}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chosen(found: list[Function], documents: int, most: int) -> list[Function]:
    """`documents` functions, evenly spread over the files, short ones first; a sixth with a doctest, if there are.

    At most `most` of a file with a doctest, and as many without.
    """
    with_doctest = capped([function for function in found if function.has_doctest], most)
    without = capped([function for function in found if not function.has_doctest], most)
    kept = evenly(with_doctest, documents // 6)
    kept += evenly(without, documents - len(kept))
    return sorted(kept, key=lambda function: len(function.input))  # batches of like lengths have little padding


def capped(found: list[Function], most: int) -> list[Function]:
    """At most `most` functions of each file, evenly spread over it."""
    by_file: dict[str, list[Function]] = {}
    for function in found:
        by_file.setdefault(function.file, []).append(function)
    return [function for of_file in by_file.values() for function in evenly(of_file, most)]


def pieces(texts: dict[str, str], length: int, count: int) -> list[dict[str, str]]:
    """`count` pieces of `length` characters that start with a line, evenly spread over all that the files have."""
    found = []
    for file, text in texts.items():
        for start in range(0, len(text) - 2 * length, length):
            line = text.find("\n", start) + 1
            found.append({"text": text[line : line + length], "file": file})
    return evenly(found, count)


def evenly(rows: list[Any], count: int) -> list[Any]:
    """`count` of the rows, or all where there are fewer, with equal gaps."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def raw(texts: dict[str, str]) -> list[dict[str, str]]:
    """Whole files."""
    return [{"text": text, "file": file} for file, text in texts.items()]


def functions(texts: dict[str, str]) -> Iterator[Function]:
    """The documented functions and methods of source files that are short enough, without indentation."""
    for file, text in texts.items():
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
        lines = text.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
                split = split_function(node, lines)
                if split is not None:
                    yield Function(*split, name=node.name, file=file, module=module_of(file))


def split_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    """Signature with docstring, and body; None for a function that is too long, empty, or cannot be taken out."""
    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    head = node.body[0].end_lineno - node.lineno + 1
    kept = text.split("\n")
    prompt, body = "\n".join(kept[:head]).rstrip(), "\n" + "\n".join(kept[head:]).rstrip() + "\n"
    longest = LONGEST_WITH_EXAMPLES if ">>>" in prompt else LONGEST
    if not body.strip() or len(prompt) > longest[0] or len(body) > longest[1]:
        return None
    # The same function must come out of prompt and completion: lines of a text in column 0 would end it early.
    found = verifiers.function_of(prompt, body)
    if found is None or verifiers.function_text(prompt, body) != prompt + body or len(found.body) != len(node.body):
        return None
    return prompt, body


def decides(function: Function) -> bool:
    """Whether the function passes its own doctest, given the names of its module, and functions that do nothing do not.

    The doctest of a method calls the class of its module, and so passes whatever is completed.
    """
    passes = lambda body: verifiers.examples_pass(function.input, body, function.module)
    return passes(function.output) and not any(map(passes, NOTHING_DONE))


def module_of(file: str) -> str:
    """The name under which the library's `file` is imported."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def unique(found: Iterator[Function], seen: set[str]) -> Iterator[Function]:
    """The functions whose text is not in `seen`, which each of them joins."""
    for function in found:
        text = function.input + function.output
        if text not in seen:
            seen.add(text)
            yield function


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
