"""Broken files are named, with the line where there is one."""

import pytest

from ebft.data.keys import DatasetEntry
from ebft.data.sources import read_source
from ebft.errors import DataError

LINE = '{"text": "a"}\n'


def read(path):
    return read_source(DatasetEntry(path=str(path), type="ebft_pretrain.transform"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", LINE * 16 + '{"text": a}\n', r"line 17: not valid JSON \(Expecting value"),
        ("a.jsonl", LINE + "[1]\n", r"line 2: a row must be a JSON object, got \[1\]"),
        ("a.json", '[{"text": "a"},\n {"text" "b"}]', "line 2: not valid JSON"),
        ("a.json", '[{"text": "a"}, 3]', "row 1: a row must be a JSON object, got 3"),
        ("a.json", "[]", "the list of rows is empty"),
        ("a.json", '[{"text": "a"}]\n[{"text": "b"}]', "line 1: text after the end of the list"),
        ("a.json", '[{"text": "a"}]\n{"text": "b"}', "line 1: text after the end of the list"),
        ("a.json", '[{"text": "a"}, {"text": "b"},', "line 1: not valid JSON .Expecting value"),
        ("a.json", '[{"text": "a"}\n', "after row 0: the list of rows has no end"),
        ("a.json", '[{"text": "a"} {"text": "b"}]', "row 1: expected a comma between the rows"),
        ("a.jsonl", LINE + '{"text": "b"}] {"text": "c"}\n', "line 2: not valid JSON"),
        ("a.jsonl", "", "the file is empty"),
        ("a.jsonl", LINE + '{"m": {"k": 1, "k": 2}}', "line 2: the key 'k' occurs 2 times in an object"),
        ("a.json", '[{"text": "a", "text": "b"}]', "row 0: the key 'text' occurs 2 times in an object"),
        ("a.jsonl", LINE + '{"m": [{"k": "\\ud83d"}]}', r"line 2: 'm' contains \\ud83d, half of a surrogate"),
        ("a.csv", "text,n\na,1\nb,2,3\n", "line 3: 3 fields, but the header has 2"),
        ("a.csv", "", "the file is empty"),
        ("a.csv", "text,n,n\na,1,2\n", "the column 'n' occurs 2 times"),
        ("a.parquet", "not parquet", "not a readable Parquet file"),
        ("a.csv", b"text\n\xff\n", "line 2: not valid UTF-8"),
        ("a.txt", b"good\nbad \xff\n", r"line 2: not valid UTF-8 \(byte 0xff at offset 9\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: not valid UTF-8"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / "0.jsonl").write_text(LINE)  # the broken file of a folder is named
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for path in (tmp_path / name, *([tmp_path] if name == "a.jsonl" else [])):
        with pytest.raises(DataError, match=f"{name}[:,] {message}"):
            read(path)


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ('\n{"text": "a \\ud83d\\ude00"}\n\n{"text": "b"} {"text": "c"}\nnull\n', ["a \U0001f600", "b", "c", None]),
        ('[{"text": "a"}, null,\n{"text": "b"}]\n', ["a", None, "b"]),
        ('["a", "b"]', ["a", "b"]),
        ('{\n"text": "a"\n}\n', ["a"]),
        ('\ufeff{"text": "a"}', ["a"]),
    ],
)
def test_shapes_of_json(tmp_path, content, rows):
    (tmp_path / "a.json").write_text(content)
    assert read(tmp_path / "a.json")["text"][:] == rows
