"""The data: TASK_PART.jsonl for every task and its parts, of which no two share a source file or a row's text.

Parts are `train` and `warm` (for the warm start), `validation`, on which learning rates are chosen, `test`, on which
models are measured, and `long`, test documents that are long enough for the feature-matching loss of long rollouts.
Rows of raw text are {text, file}; those of the other tasks are described in python_code.py and in catalogs.py of the
quickstart. Functions that are named like a problem of HumanEval are left out, so that models can be tested on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import project
import python_code
import sources
from python_code import Count
from rows import Row, read_rows, spread, unique, write_rows
from scale import Scale

from ebft.tools.quickstart import catalogs
from ebft.tools.quickstart.run import console
from ebft.tools.quickstart.tiny import number_of, part_of

PARTS = ("train", "warm", "validation", "test", "long")
SHARES = {"train": 62, "validation": 10, "test": 28}  # of the Python files, in percent; `warm` is of the first
# Rows of one source file, so that no large one stands for all.
MOST_OF_A_FILE = {"train": 16, "validation": 2, "test": 2, "long": 2}
TINY = project.HERE / "tiny"


def write_corpus(folder: Path, scale: Scale, count: Count) -> None:
    """Write the files, with as many rows as `scale` says, of lengths in tokens by `count`."""
    problems = read_rows(TINY / "problems.jsonl") if scale.is_tiny else sources.humaneval()
    texts = python_code.python_files(scale.max_files)
    by_part: dict[str, dict[str, str]] = {part: {} for part in SHARES}
    for file in sorted(texts, key=number_of):
        by_part[part_of(file, SHARES)][file] = texts[file]
    excluded = {problem["entry_point"] for problem in problems}
    tasks = {
        "functions": all_functions(by_part, scale, count, excluded),
        "raw": all_pieces(by_part, scale, count),
        "translation": all_translations(scale, count),
    }
    for task, rows in tasks.items():
        for part in PARTS:
            write_rows(folder / f"{task}_{part}.jsonl", rows[part])
        console.print(f"{task}: " + ", ".join(f"{len(rows[part])} {part}" for part in PARTS))


def all_functions(
    by_part: dict[str, dict[str, str]], scale: Scale, count: Count, excluded: set[str]
) -> dict[str, list[Row]]:
    """The functions of each part; those named like a problem of HumanEval are left out, and copies of bodies."""
    found: dict[str, list[Row]] = {}
    seen: set[str] = set()
    for part in ("test", "validation", "train"):
        found[part] = []
        for file, text in by_part[part].items():
            for row in python_code.functions(file, text):
                key = python_code.body_key(row)
                if row["name"] not in excluded and key not in seen:
                    seen.add(key)
                    found[part].append(row)
    fits = lambda row: count(row["input"]) <= scale.prompt and scale.shortest <= count(row["output"]) <= scale.longest
    found["long"] = [row for row in found["test"] if count(row["output"]) > scale.long_tokens["functions"]]
    found["long"] = [row for row in found["long"] if count(row["input"]) <= scale.prompt]
    chosen = chosen_parts({**found, **{part: list(filter(fits, found[part])) for part in SHARES}}, scale)
    for part in ("test", "validation"):
        chosen[part] = with_doctests(chosen[part], found[part], scale, count)
    return chosen


def with_doctests(chosen: list[Row], found: list[Row], scale: Scale, count: Count) -> list[Row]:
    """The rows with some of them exchanged for functions with a doctest, of longer prompts, as few others have one."""
    is_short = lambda row: count(row["output"]) <= scale.longest and count(row["input"]) <= 3 * scale.prompt
    tried = spread([row for row in found if ">>>" in row["input"] and is_short(row)], 200, 3)
    kept = [{**row, "has_doctest": True} for row in tried if python_code.has_doctest(row)][: len(chosen) // 8]
    inputs = {row["input"] for row in kept}
    others = [row for row in chosen if row["input"] not in inputs]
    rows = [*kept, *spread(others, len(chosen) - len(kept), len(others))]
    return sorted(rows, key=lambda row: len(row["input"]) + len(row["output"]))


def all_pieces(by_part: dict[str, dict[str, str]], scale: Scale, count: Count) -> dict[str, list[Row]]:
    """Pieces of the files of each part; a text that files of two have stays with the first; `long` overlaps `test`."""

    def cut(part: str, tokens: int, most: int) -> list[Row]:
        """Pieces of so many files as are needed, at most `most` of each."""
        found: list[Row] = []
        for file, text in by_part[part].items():
            found += itertools.islice(python_code.pieces(file, text, tokens, count), most)
            if len(found) > 2 * sum(scale.rows.values()):
                break
        return found

    found: dict[str, list[Row]] = {}
    seen: set[str] = set()
    for part in ("test", "validation", "train"):
        pieces = unique(cut(part, scale.piece, MOST_OF_A_FILE[part]), "text")
        found[part] = [row for row in pieces if row["text"] not in seen]  # notices of licences are in many files
        seen |= {row["text"] for row in pieces}
    return chosen_parts({**found, "long": cut("test", int(scale.long_tokens["raw"] * 1.2), 2)}, scale)


def all_translations(scale: Scale, count: Count) -> dict[str, list[Row]]:
    """Messages of the applications of each part; an English text that two have stays with the first of the two."""
    found: dict[str, list[Row]] = {}
    seen: set[str] = set()
    for part in ("test", "validation", "train"):
        rows = [row for app, files in applications(part, scale) for row in catalogs.rows(app, files)]
        found[part] = unique([row for row in rows if row["input"] not in seen], "input")
        seen |= {row["input"] for row in rows}
    fits = lambda row: count(row["input"]) <= scale.prompt and scale.shortest <= count(row["output"]) <= scale.longest
    found["long"] = [row for row in found["test"] if count(row["output"]) > scale.long_tokens["translation"]]
    return chosen_parts({**found, **{part: list(filter(fits, found[part])) for part in SHARES}}, scale)


def applications(part: str, scale: Scale) -> list[tuple[str, dict[str, str]]]:
    """The applications of a part with their catalogs."""
    if scale.is_tiny:
        return [(part, {"fr.po": (TINY / f"{part}.po").read_text(encoding="utf-8")})]
    return [(wheel.name, catalogs.french(wheel)) for wheel in sources.APPLICATIONS[part]]


def chosen_parts(found: dict[str, list[Row]], scale: Scale) -> dict[str, list[Row]]:
    """As many rows of every part as the scale says; the first of the training rows are those of the warm start."""
    chosen = {}
    for part in ("validation", "test", "long"):
        chosen[part] = spread(found[part], scale.rows[part], MOST_OF_A_FILE[part])
        # Batches of documents of like lengths have little padding.
        chosen[part].sort(key=lambda row: len(row.get("input", "")) + len(row.get("output", "")))
    trained = spread(found["train"], scale.rows["train"] + scale.rows["warm"], MOST_OF_A_FILE["train"])
    warm = len(trained) * scale.rows["warm"] // (scale.rows["train"] + scale.rows["warm"])
    files = list(dict.fromkeys(row["file"] for row in trained))  # whole files, so that the two share none
    order = {file: number for number, file in enumerate(sorted(files, key=number_of))}
    trained.sort(key=lambda row: order[row["file"]])
    while 0 < warm < len(trained) and trained[warm]["file"] == trained[warm - 1]["file"]:
        warm += 1
    return {**chosen, "warm": trained[:warm], "train": trained[warm:]}


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """Tokens of a text by a tokenizer, without special ones."""
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
