"""The data: parts, functions, and doctests that decide something."""

import ast
import itertools
import json
from collections import Counter

import pytest
from corpus import (
    MOST_OF_A_FILE,
    SHORTEST,
    Function,
    capped,
    decides,
    evenly,
    functions,
    module_of,
    pieces,
    sources,
    split_function,
    write_corpus,
)
from sizes import SIZES
from verifiers import function_text, parses

FUNCTIONS = ("functions_train", "functions_validation", "functions_test")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("data")
    write_corpus(folder, SIZES["tiny"])
    return {path.stem: [json.loads(line) for line in path.open()] for path in folder.glob("*.jsonl")}


def test_parts_share_neither_files_nor_functions(rows):
    files = {name: {row["file"] for row in part} for name, part in rows.items()}
    parts = {part: files[f"functions_{part}"] | files[f"raw_{part}"] for part in ("train", "validation", "test")}
    parts["pretrain"] = files["pretrain"]
    for one, other in itertools.combinations(parts, 2):
        assert parts[one] and parts[other] and not parts[one] & parts[other]
    pretrained = "".join(row["text"] for row in rows["pretrain"])
    assert not any(row["input"].split("\n", 1)[1] + row["output"] in pretrained for row in rows["functions_test"])
    texts = [row["input"] + row["output"] for name in FUNCTIONS for row in rows[name]]
    assert len(texts) == len(set(texts))


def test_every_reference_is_a_whole_function(rows):
    for row in itertools.chain(*(rows[name] for name in FUNCTIONS)):
        assert row["input"].endswith(('"', "'")) and row["output"].startswith("\n")
        assert function_text(row["input"], row["output"]) == row["input"] + row["output"]
        assert parses(row["input"], [row["output"]], row) == 1.0


def test_functions_are_dedented_and_split_behind_the_docstring():
    text = 'class A:\n    def f(self):\n        """F."""\n        # why\n        return 1\n\n    def g(self): pass\n'
    (found,) = functions({"a/b.py": text})
    assert (found.input, found.output) == ('def f(self):\n    """F."""', "\n    # why\n    return 1\n")
    assert (found.name, found.module) == ("f", "a.b")


@pytest.mark.parametrize(
    "body",
    [
        '    """Only a docstring."""',
        "    \"\"\"D.\"\"\"\n    x = '''\nfirst column'''\n    return x",  # a text that ends the function early
        '    """D."""\n' + "    x = 1\n" * 100 + "    return x",
        '    """D."""; return 1',
    ],
)
def test_functions_that_cannot_be_completed_are_left_out(body):
    text = f"def f():\n{body}\n"
    assert split_function(ast.parse(text).body[0], text.split("\n")) is None


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
    assert decides(Function(input, output, "f", "f.py", "")) is expected


def test_no_file_stands_for_all(rows):
    for part, most in MOST_OF_A_FILE.items():
        counts = Counter((row["file"], row["has_doctest"] and part != "train") for row in rows[f"functions_{part}"])
        assert counts and max(counts.values()) <= most
    found = [Function("i", "o", str(number), "a.py", "a") for number in range(10)]
    assert [function.name for function in capped(found, 2)] == ["0", "5"]


def test_every_row_has_room_for_a_block(rows):
    assert all(len(row["output"]) >= SHORTEST for name in FUNCTIONS for row in rows[name])


def test_test_documents_have_the_files_they_are_from(rows, tmp_path):
    for name in ("functions_test", "raw_test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    assert sources(tmp_path)["functions"] == [row["file"] for row in rows["functions_test"]]


def test_small_things():
    assert module_of("a/__init__.py") == "a" and module_of("a/b.py") == "a.b"
    assert evenly([1, 2, 3, 4], 2) == [1, 3] and evenly([1], 5) == [1]
    text = "".join(f"line {number}\n" for number in range(100))
    assert all(row["text"].startswith("line") and len(row["text"]) == 50 for row in pieces({"f": text}, 50, 5))
