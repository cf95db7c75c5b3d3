"""The data: parts that share neither files nor texts, functions, pieces, catalogs, and what is left out."""

import ast
import itertools
import json
from collections import Counter
from dataclasses import replace

import corpus
import pytest
import python_code
import translation
from corpus import PARTS, write_corpus
from rows import read_rows, spread, write_rows
from scale import SCALES
from verifiers import function_of, function_text, is_trivial

from ebft.tools.quickstart import catalogs

TASKS = ("functions", "translation", "raw")
SCALE = replace(SCALES["tiny"], max_files=40)
FUNCTION = '''def total(values, more):
    """Return the sum of values and more."""
    # WHY
    log("WHY")
    return sum(values) + sum(more)
'''


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:  # running them all takes most of the time
        patch.setattr(python_code, "has_doctest", lambda row: ">>>" in row["input"])
        write_corpus(folder, SCALE, lambda text: len(text) // 2)
    return {path.stem: read_rows(path) for path in folder.glob("*.jsonl")}


def text_of(row: dict) -> str:
    return row.get("text", row.get("input", "") + row.get("output", ""))


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


def test_rows_are_whole_functions_of_the_wanted_lengths_that_do_something(rows):
    excluded = {problem["entry_point"] for problem in read_rows(corpus.TINY / "problems.jsonl")}
    for row in itertools.chain(*(rows[f"functions_{part}"] for part in PARTS)):
        assert row["input"].endswith(('"', "'")) and row["output"].startswith("\n") and row["output"].isascii()
        assert function_text(row["input"], row["output"]) == row["input"] + row["output"]
        assert excluded and row["name"] not in excluded
        assert not is_trivial(function_of(row["input"], row["output"]))
    for row in itertools.chain(*(rows[f"functions_{part}"] for part in ("train", "warm", "validation"))):
        assert len(row["input"]) // 2 <= SCALE.prompt and SCALE.shortest <= len(row["output"]) // 2 <= SCALE.longest
    assert all(len(row["output"]) // 2 > SCALE.long_tokens["functions"] for row in rows["functions_long"])


def test_functions_are_dedented_and_split_behind_the_docstring_or_left_out():
    text = 'class A:\n    def f(self):\n        """F."""\n        # why\n        return 1 + 2\n\n    def g(s): pass\n'
    (found,) = python_code.functions("stdlib/a/b.py", text)
    assert (found["input"], found["output"]) == ('def f(self):\n    """F."""', "\n    # why\n    return 1 + 2\n")
    assert (found["name"], found["module"]) == ("f", "a.b")
    for body in (
        '    """Only a docstring."""',
        "    \"\"\"D.\"\"\"\n    x = '''\nfirst column'''\n    return x + 1",  # a text that ends the function early
        '    """D."""\n    raise NotImplementedError',
        '    """D."""\n    return None',
        '    """D."""; return 1 + 2',
    ):
        text = f"def f():\n{body}\n"
        assert python_code.split_function(ast.parse(text).body[0], text.split("\n")) is None, body


def test_doctests_count_where_doing_nothing_fails_them():
    for examples, body, expected in (
        (">>> f(1)\n    2", "return x + 1", True),
        (">>> f(1)\n    3", "return x + 1", False),  # its own is wrong
        ('>>> len("ab")\n    2', "return x + 1", False),  # of others
        (">>> f(1)", "return None", False),  # nothing done is enough
    ):
        row = {"input": f'def f(x):\n    """F.\n\n    {examples}\n    """', "output": f"\n    {body}\n", "module": ""}
        assert python_code.has_doctest({**row, "file": "stdlib/f.py"}) is expected, examples
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


NAMES = ("pair_distance", "distinct", "distinct_2")
CATALOG = """
msgid ""
msgstr "Language: fr"

#: app/views.py:10 app/other.py:3
msgid "The file could not be opened."
msgstr "Impossible d'ouvrir le fichier."

#. Default: "Show all of the entries"
#: app/list.py:7
msgid "label_show"
msgstr "Afficher toutes "
"les entrées"

#, fuzzy
msgid "This one is not reliable."
msgstr "Rien à voir avec cela."

msgid "%d file was removed now"
msgid_plural "%d files were removed now"
msgstr[0] "%d fichier a été supprimé"
msgstr[1] "%d fichiers ont été supprimés"

msgid "Too short here"
msgstr "Trop court ici"

msgid "Not translated at all yet."
msgstr ""

msgid "The same in both languages"
msgstr "The same in both languages"

msgid "See <a href=x>the manual</a> for more."
msgstr "Voir <a href=x>le manuel</a>."

msgid "%(a)s and %(b)s and %(c)s are given"
msgstr "%(a)s et %(b)s et %(c)s sont donnés"

#~ msgid "An obsolete entry of the list"
#~ msgstr "Une entrée obsolète de la liste"

msgctxt "menu"
msgid "A message with \\"quotes\\" and context"
msgstr "Un message avec des \\"guillemets\\""
"""


def test_plain_sentences_of_catalogs_become_rows():
    found = list(catalogs.rows("app", {"fr.po": CATALOG}))
    assert [(row["input"], row["output"], row["file"]) for row in found] == [
        (f"English: {english}\nFrench:", f" {french}\n", file)
        for english, french, file in (
            ("The file could not be opened.", "Impossible d'ouvrir le fichier.", "app/app/views.py"),
            ("Show all of the entries", "Afficher toutes les entrées", "app/app/list.py"),
            ('A message with "quotes" and context', 'Un message avec des "guillemets"', "app/fr.po"),
        )
    ]
    assert len(list(catalogs.rows("app", {"a.po": CATALOG, "b.po": CATALOG}))) == 3, "a message of two is one row"


def test_scores_of_translations():
    """Of the first line; corpus scores are those of all lines together, and equal samples are not spread."""
    row = {"output": " Le fichier est introuvable.\n"}
    assert translation.chrf("", [" Le fichier est introuvable.\nEnglish: more"], row) == pytest.approx(1.0)
    assert 0.2 < translation.chrf("", [" Le dossier est vide."], row) < 0.9
    assert translation.chrf("", [""], row) == translation.chrf("", ["\n\nLe fichier"], row) == 0.0
    references = ["Le fichier est introuvable ici.", "Voulez-vous enregistrer les modifications ?"]
    assert translation.corpus_scores(references, references) == pytest.approx({"corpus_bleu": 1.0, "corpus_chrf": 1.0})
    found = translation.corpus_scores([references[0], "rien"], references)
    assert 0 < found["corpus_bleu"] < 0.6 and 0.2 < found["corpus_chrf"] < 0.8
    spread = lambda *texts: pytest.approx(tuple(translation.spread([*texts])[name] for name in NAMES))
    assert spread(*["a b c"] * 4) == (0, 0, 0.25) and spread(*[""] * 4) == (0, 0, 0)
    assert spread("one two", "jig cap") == (1.0, 1.0, 1.0) and translation.distinct_bigrams(["a", ""]) == 0.0


def test_a_completion_ends_where_its_function_does():
    prompt = 'def f(x):\n    "Double."'
    completion = "\n    y = 2 * x\n\n    return y\n\ndef g(x):\n    return x"
    assert function_text(prompt, completion) == prompt + "\n    y = 2 * x\n\n    return y\n"
    assert len(function_of(prompt, completion).body) == 3
    for completion in ("", "\n", "\n    return (", "\nreturn x", "\nThis function doubles."):
        assert function_of(prompt, completion) is None, completion
