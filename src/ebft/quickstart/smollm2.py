"""The quickstart of a real model: SmolLM2-135M-Instruct learns to write the function that a docstring describes.

The text is the source of Python's standard library: functions with a docstring, of at most MOST_PROMPT tokens before
the body and BODY tokens in it, so that a step of training takes seconds on two cores. Files are split into those that
are trained on and those that are held out, and no body is in both.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ebft.config.load import load_config
from ebft.errors import FetchError, ModelError
from ebft.fetch.convert import fetch_model
from ebft.models.tokenizer import load_tokenizer
from ebft.quickstart.corpus import number_of, part_of, standard_library
from ebft.quickstart.functions import Function, functions, unique, within_tokens
from ebft.quickstart.hardware import bfloat16_is_fast
from ebft.quickstart.phases import Phases, console, fingerprint, make_once
from ebft.quickstart.run import CONFIGS, Run, own_copy

NAME = "smollm2"
OUTPUT = Path("outputs/quickstart")  # what smollm2.yaml names
CONFIG = CONFIGS / "smollm2.yaml"

PARTS = {"train": 75, "held_out": 25}  # in percent of the files
MOST_OF_A_FILE = {"train": 10, "held_out": 6}  # functions, so that no large file dominates
MOST_PROMPT, BODY = 70, (16, 48)  # tokens
FEWEST_ROWS = 16
GROUPS = 12  # of 8 held-out functions each
TEST = {
    "max_files": 120,
    "groups": 2,
    "overrides": ["max_steps=2", "micro_batch_size=2", "warmup_steps=1"],
}


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
    moved = [
        f"datasets.0.path={output / 'data' / 'train.jsonl'}",
        f"test_datasets.0.path={output / 'data' / 'held_out.jsonl'}",
        f"output_dir={output / 'ebft'}",
    ]
    return [
        *([f"base_model={model}"] if model != NAME else []),
        *(moved if output != OUTPUT else []),
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
