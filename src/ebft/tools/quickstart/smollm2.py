"""The quickstart of a real model: SmolLM2-135M-Instruct learns to write the function that a docstring describes.

The text is the source of Python's standard library: functions with a docstring, of at most MOST_PROMPT tokens before
the body and BODY tokens in it, so that a step of training takes seconds on two cores. Files are split into those that
are trained on and those that are held out, and no body is in both.
"""

import ast
import json
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebft.config.schema import load_config
from ebft.errors import FetchError, ModelError
from ebft.models.tokenizer import load_tokenizer
from ebft.tools.fetch import fetch_model
from ebft.tools.quickstart.run import CONFIGS, Phases, Run, console, fingerprint, make_once, moved, own_copy
from ebft.tools.quickstart.tiny import number_of, part_of, standard_library


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


NAME = "smollm2"
OUTPUT = Path("outputs/quickstart")  # what smollm2.yaml names
CONFIG = CONFIGS / "smollm2.yaml"

PARTS = {"train": 75, "held_out": 25}  # in percent of the files
MOST_OF_A_FILE = {"train": 10, "held_out": 6}  # functions, so that no large file dominates
MOST_PROMPT, BODY = 70, (16, 48)  # tokens
FEWEST_ROWS = 16
GROUPS = 12  # of 8 held-out functions each
TEST = {"max_files": 120, "groups": 2, "overrides": ["max_steps=2", "micro_batch_size=2", "warmup_steps=1"]}


def prepare(phases: Phases, output: Path, seed: int, model: str, scale: str) -> Run:
    """Fetch the model, write the functions, and return the run that fine-tunes it.

    `model` is NAME, or a model folder or hub id that takes the place of SmolLM2.
    """
    full = scale == "full"
    overrides = [*config_overrides(output, seed, model), *([] if full else TEST["overrides"])]
    config = load_config(CONFIG, overrides)

    with phases.phase("model", "Model: SmolLM2-135M-Instruct" if model == NAME else f"Model: {model}"):
        if model == NAME:
            fetch(config.base_model)
        tokenizer = load_tokenizer(config)

    with phases.phase("data", "Text: documented functions of this machine's Python standard library"):
        data, max_files = output / "data", None if full else TEST["max_files"]
        tokens = fingerprint(tokenizer.get_vocab())
        made_from = [sys.version, config.base_model, tokens, PARTS, MOST_OF_A_FILE, MOST_PROMPT, BODY, max_files]
        make_once(data, made_from, lambda: write_functions(data, tokenizer, max_files))
    return Run(own_copy(CONFIG, output), overrides, GROUPS if full else TEST["groups"])


def fetch(name: str) -> None:
    """Download and convert the model `name` unless it is in the cache. FetchError names the way without a download."""
    try:
        console.print(f"In {fetch_model(name)}")
    except (FetchError, ModelError) as error:
        raise type(error)(f"{error}\nWithout a download: ebft quickstart --model tiny") from error


def config_overrides(output: Path, seed: int, model: str) -> list[str]:
    """What smollm2.yaml does not say: another model, output folder or seed, the number type that is fast here."""
    data = {"datasets.0.path": "data/train.jsonl", "test_datasets.0.path": "data/held_out.jsonl"}
    return [
        *([f"base_model={model}"] if model != NAME else []),
        *moved(output, OUTPUT, {**data, "output_dir": "ebft"}),
        *([f"seed={seed}"] if seed else []),
        *([] if bfloat16_is_fast() else ["torch_dtype=float32"]),
    ]


def write_functions(folder: Path, tokenizer: Any, max_files: int | None = None) -> None:
    """Write train.jsonl and held_out.jsonl with rows {input, output, name, file}. Raises ValueError for too few."""
    library = standard_library(max_files)
    seen: set[str] = set()
    folder.mkdir(parents=True, exist_ok=True)
    for part in reversed(PARTS):  # what is held out comes first: a body that is there is not trained on
        texts = {file: text for file, text in library.items() if part_of(file, PARTS) == part}
        # A docstring with a session at the prompt ">>>" is answered with more of the session.
        plain = (function for function in functions(texts) if not function.has_examples)
        short = unique(within_tokens(plain, tokenizer, MOST_PROMPT, BODY), seen)
        rows = capped(short, MOST_OF_A_FILE[part])
        if len(rows) < FEWEST_ROWS:
            raise ValueError(
                f"the standard library has only {len(rows)} documented functions of {MOST_PROMPT} and {BODY} tokens "
                f"for {part}.jsonl, and the quickstart needs {FEWEST_ROWS}. Run it with a Python that ships its source "
                "(python.org, conda, uv, pyenv)."
            )
        lines = [json.dumps(vars(row), ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        console.print(f"{part}.jsonl: {len(rows)} functions of {len({row.file for row in rows})} files")


def capped(found: Iterable[Function], most: int) -> list[Function]:
    """At most `most` functions of each file, evenly spread over it, in an order that does not follow their files."""
    by_file: dict[str, list[Function]] = {}
    for function in found:
        by_file.setdefault(function.file, []).append(function)
    kept = []
    for of_file in by_file.values():
        count = min(most, len(of_file))
        kept += [of_file[index * len(of_file) // count] for index in range(count)]
    return sorted(kept, key=lambda function: number_of(function.file + function.input + function.output))


def bfloat16_is_fast() -> bool:
    """Whether this machine multiplies matrices in bfloat16 faster than in float32.

    Processors without bfloat16 instructions emulate it, far more slowly. Measured rather than looked up, as each kind
    of processor would need its own check. With an accelerator the answer is yes.
    """
    if torch.accelerator.is_available():
        return True
    return _product_seconds(torch.bfloat16) < _product_seconds(torch.float32)


def _product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a product of the size that is common in SmolLM2-135M, the fastest of several."""
    inputs, weights = torch.ones(512, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        torch.nn.functional.linear(inputs, weights)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
