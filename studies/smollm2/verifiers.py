"""Verifiers of a completed function: it parses, it uses the names of its reference, it passes its doctest.

Each takes the prompt (signature and docstring), a list with one completion, and the row of the data set; it returns a
score in [0, 1], or None where it does not apply to the row. A completion counts up to its function's end: the first
line that starts in column 0, as the stop sequences of HumanEval have it.
"""

import ast
import doctest
import warnings
from typing import Any

import sandbox


def parses(prompt: str, completions: list[str], row: dict[str, Any]) -> float | None:
    """1 where the completed function is valid Python with a statement behind its docstring, else 0."""
    return float(function_of(prompt, completions[0]) is not None)


def passes_doctest(prompt: str, completions: list[str], row: dict[str, Any]) -> float | None:
    """1 where the completed function passes the examples of its own docstring, else 0.

    Only for rows whose doctest decides anything (`has_doctest`, see `python_code.has_doctest`); None elsewhere.
    """
    if not row["has_doctest"]:
        return None
    return float(examples_pass(prompt, completions[0], row["module"]))


def is_trivial(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a body does nothing of its own: only `pass`, constants, bare returns, or NotImplementedError."""
    return all(map(_does_nothing, function.body[1:]))


def substance(prompt: str, completions: list[str], row: dict[str, Any]) -> float | None:
    """F1 of the names that a body uses against those of its reference; 0 where it does not parse or is trivial.

    What RLVR is rewarded with: neither parsing alone nor naming everything pays. None where the reference uses none.
    """
    reference = function_of(prompt, row["output"])
    wanted = names_used(reference) if reference is not None else set()
    if not wanted:
        return None
    function = function_of(prompt, completions[0])
    if function is None or is_trivial(function):
        return 0.0
    used = names_used(function)
    return 2 * len(wanted & used) / (len(wanted) + len(used))


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return "NotImplementedError" in ast.dump(statement)
    value = statement.value if isinstance(statement, (ast.Return, ast.Expr)) else None
    is_plain = value is None or isinstance(value, (ast.Constant, ast.Name))
    return isinstance(statement, (ast.Pass, ast.Return, ast.Expr)) and is_plain


def names_used(function: ast.AST) -> set[str]:
    """Names of what a function calls, and of every attribute in it."""
    names = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return names | {called.id for called in calls if isinstance(called, ast.Name)}


def examples_pass(prompt: str, completion: str, module: str = "", cpu_seconds: int = sandbox.CPU_SECONDS) -> bool:
    """Whether the function passes every example of its docstring; False where it has none.

    What the examples should print is compared here, out of the reach of the code that runs.
    """
    function = function_of(prompt, completion)
    if function is None:
        return False
    try:
        examples = doctest.DocTestParser().get_examples(ast.get_docstring(function))
    except ValueError:  # examples that are indented wrongly
        return False
    if all(example.options.get(doctest.SKIP) for example in examples):
        return False
    code, tried = function_text(prompt, completion), [example.source for example in examples]
    found = sandbox.run_examples(code, tried, module, cpu_seconds)
    return len(found) == len(examples) and all(map(_as_wanted, examples, found))


def _as_wanted(example: doctest.Example, found: dict[str, Any]) -> bool:
    """Whether one example printed or raised what its docstring says, by doctest's own rules."""
    flags = sum(flag for flag, is_set in example.options.items() if is_set)
    if flags & doctest.SKIP:
        return True
    check = doctest.OutputChecker().check_output
    if example.exc_msg is None:
        return found["raised"] is None and check(example.want, found["printed"], flags)
    if found["raised"] is None:
        return False
    if flags & doctest.IGNORE_EXCEPTION_DETAIL:
        return _kind(found["raised"]) == _kind(example.exc_msg)
    return check(example.exc_msg, found["raised"], flags)


def _kind(raised: str) -> str:
    """The name of an exception without module and message."""
    return raised.strip().partition(":")[0].rpartition(".")[2]


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
