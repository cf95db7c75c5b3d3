"""The data: parts that share neither files nor texts, functions that can be completed, pieces, and what is left out."""

import ast
import itertools
import json
from collections import Counter

import corpus
import pytest
import python_code
from corpus import PARTS, write_corpus
from rows import read_rows, spread, write_rows
from scale import SCALES
from verifiers import is_trivial

from ebft.tools.quickstart.smollm2 import function_of, function_text

TASKS = ("functions", "translation", "raw")
SCALE = SCALES["tiny"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("data")
    write_corpus(folder, SCALE, lambda text: len(text) // 2)
    return {path.stem: read_rows(path) for path in folder.glob("*.jsonl")}


@pytest.mark.parametrize("task", TASKS)
def test_no_two_parts_share_a_file_or_a_text(rows, task):
    """Long documents are from the files of the test part, and nothing is trained on either."""
    parts = {part: rows[f"{task}_{part}"] for part in PARTS}
    trained = ("train", "warm", "validation")
    for one, other in itertools.combinations(PARTS, 2):
        assert parts[one] and parts[other]
        if {one, other} & set(trained):
            assert not {row["file"] for row in parts[one]} & {row["file"] for row in parts[other]}, (one, other)
            assert not set(map(text_of, parts[one])) & set(map(text_of, parts[other])), (one, other)
    inputs = [row.get("input", row.get("text")) for part in trained for row in parts[part]]
    assert not set(inputs) & {row.get("input", row.get("text")) for row in (*parts["test"], *parts["long"])}


def text_of(row: dict) -> str:
    return row.get("text", row.get("input", "") + row.get("output", ""))


def test_a_body_is_in_one_part_only(tmp_path, monkeypatch):
    """Copies that differ in names of files, comments and texts."""
    files = {f"stdlib/{number}.py": FUNCTION.replace("WHY", str(number)) for number in range(40)}
    monkeypatch.setattr(python_code, "python_files", lambda max_files: files)
    by_part = {"train": files, "test": files, "validation": files}
    found = corpus.all_functions(by_part, SCALE, len, set())
    assert sum(len(part) for part in found.values()) == 1
    assert sum(len(part) for part in corpus.all_functions(by_part, SCALE, len, {"total"}).values()) == 0


def test_a_piece_of_text_is_in_one_part_only():
    """Files that begin with the same notice, which is a piece of its own."""
    notice = "# a notice of some licence\n" * 60
    bodies = {number: "".join(f"line_{number}_{line} = 1\n" for line in range(200)) for number in range(24)}
    files = {f"package/{number}.py": notice + body for number, body in bodies.items()}
    parts = ("train", "validation", "test")
    by_part = {part: dict(list(files.items())[place::3]) for place, part in enumerate(parts)}
    found = corpus.all_pieces(by_part, SCALE, lambda text: len(text) // 10)
    texts = {part: [row["text"] for row in found[part]] for part in (*parts, "warm")}
    holders = [part for part, of_part in texts.items() if any("notice" in text for text in of_part)]
    assert all(texts.values()) and len(holders) <= 1
    for one, other in itertools.combinations(texts, 2):
        assert not set(texts[one]) & set(texts[other])


FUNCTION = '''def total(values, more):
    """Return the sum of values and more."""
    # WHY
    log("WHY")
    return sum(values) + sum(more)
'''


def test_functions_named_like_problems_of_humaneval_are_left_out(rows):
    excluded = {problem["entry_point"] for problem in rows["humaneval"]}
    names = {row["name"] for part in PARTS for row in rows[f"functions_{part}"]}
    assert excluded and not excluded & names


def test_every_reference_is_a_whole_function_that_does_something(rows):
    for row in itertools.chain(*(rows[f"functions_{part}"] for part in PARTS)):
        assert row["input"].endswith(('"', "'")) and row["output"].startswith("\n") and row["output"].isascii()
        assert function_text(row["input"], row["output"]) == row["input"] + row["output"]
        assert not is_trivial(function_of(row["input"], row["output"]))


def test_rows_have_the_wanted_lengths(rows):
    for part in ("train", "warm", "validation"):
        for row in rows[f"functions_{part}"]:
            assert len(row["input"]) // 2 <= SCALE.prompt
            assert SCALE.shortest <= len(row["output"]) // 2 <= SCALE.longest
    assert all(len(row["output"]) // 2 > SCALE.long_tokens["functions"] for row in rows["functions_long"])


def test_functions_are_dedented_and_split_behind_the_docstring():
    text = (
        'class A:\n    def f(self):\n        """F."""\n        # why\n        return 1 + 2\n\n    def g(self): pass\n'
    )
    (found,) = python_code.functions("stdlib/a/b.py", text)
    assert (found["input"], found["output"]) == ('def f(self):\n    """F."""', "\n    # why\n    return 1 + 2\n")
    assert (found["name"], found["module"]) == ("f", "a.b")


@pytest.mark.parametrize(
    "body",
    [
        '    """Only a docstring."""',
        "    \"\"\"D.\"\"\"\n    x = '''\nfirst column'''\n    return x + 1",  # a text that ends the function early
        '    """D."""\n    raise NotImplementedError',
        '    """D."""\n    return None',
        '    """D."""; return 1 + 2',
    ],
)
def test_functions_that_cannot_be_completed_are_left_out(body):
    text = f"def f():\n{body}\n"
    assert python_code.split_function(ast.parse(text).body[0], text.split("\n")) is None


@pytest.mark.parametrize(
    ("input", "output", "expected"),
    [
        ('def f(x):\n    """F.\n\n    >>> f(1)\n    2\n    """', "\n    return x + 1\n", True),
        ('def f(x):\n    """F.\n\n    >>> f(1)\n    3\n    """', "\n    return x + 1\n", False),  # its own is wrong
        ('def f(x):\n    """F.\n\n    >>> len("ab")\n    2\n    """', "\n    return x + 1\n", False),  # of others
        ('def f(x):\n    """F.\n\n    >>> f(1)\n    """', "\n    return None\n", False),  # nothing done is enough
    ],
)
def test_doctests_count_where_doing_nothing_fails_them(input, output, expected):
    row = {"input": input, "output": output, "file": "stdlib/f.py", "module": ""}
    assert python_code.has_doctest(row) is expected
    assert not python_code.has_doctest({**row, "file": "torch/f.py"}), "whose import takes too long"


def test_no_file_and_no_package_stands_for_all():
    many = [{"file": f"{'ab'[n > 60]}/{n % 7}.py", "text": str(n)} for n in range(100)]
    found = spread(many, 20, 2)
    assert max(Counter(row["file"] for row in found).values()) == 2
    assert Counter(row["file"][0] for row in spread(many, 10, 50)) == {"a": 5, "b": 5}
    assert spread(many[::-1], 20, 2) == found, "the order that rows come in decides nothing"


def test_pieces_are_whole_lines_of_like_length():
    text = "".join(f"line {number}\n" for number in range(100))
    found = list(python_code.pieces("f", text, 10, lambda line: 2))
    assert all(row["text"].count("\n") == 5 and row["text"].startswith("line") for row in found) and len(found) == 19
    assert list(python_code.pieces("f", text, 1, lambda line: 2)) == []


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [{"text": "a\u2028b\nc"}, {"text": "é"}]
    write_rows(tmp_path / "x.jsonl", rows)
    assert read_rows(tmp_path / "x.jsonl") == rows
    assert json.loads((tmp_path / "x.jsonl").read_text(encoding="utf-8").split("\n")[1]) == rows[1]
