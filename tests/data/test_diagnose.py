"""Broken files are named, with the line where there is one."""

import pytest

from ebft.data.keys import DatasetEntry
from ebft.data.sources import read_source
from ebft.errors import DataError


def read(path):
    return read_source(DatasetEntry(path=str(path), type="ebft_pretrain.transform"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n' * 16 + '{"text": a}\n', r"a.jsonl, line 17: not valid JSON \(Expecting value"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', r"a.jsonl, line 2: a row must be a JSON object, got \[1\]"),
        ("a.json", '[{"text": "a"},\n {"text" "b"}]', "a.json, line 2: not valid JSON"),
        ("a.json", '[{"text": "a"}, 3]', "a.json, row 1: a row must be a JSON object, got 3"),
        ("a.json", "[]", "a.json: the list of rows is empty"),
        ("a.json", '[{"text": "a"}]\n[{"text": "b"}]', "a.json, line 1: text after the end of the list"),
        ("a.json", '[{"text": "a"}]\n{"text": "b"}', "a.json, line 1: text after the end of the list"),
        (
            "a.json",
            '[{"text": "a"}, {"text": "b"},',
            "a.json, line 1: not valid JSON .Expecting value",
        ),
        ("a.json", '[{"text": "a"}\n', "a.json, after row 0: the list of rows has no end"),
        ("a.json", '[{"text": "a"} {"text": "b"}]', "a.json, row 1: expected a comma between the rows"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"}] {"text": "c"}\n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", "", "a.jsonl: the file is empty"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"m": {"k": 1, "k": 2}}',
            "a.jsonl, line 2: the key 'k' occurs 2 times in an object",
        ),
        ("a.json", '[{"text": "a", "text": "b"}]', "a.json, row 0: the key 'text' occurs 2 times in an object"),
        (
            "a.jsonl",
            '{"n": 1}\n{"m": [{"k": "\\ud83d"}]}',
            r"a.jsonl, line 2: 'm' contains \\ud83d, half of a surrogate",
        ),
        ("a.csv", "text,n\na,1\nb,2,3\n", "a.csv, line 3: 3 fields, but the header has 2"),
        ("a.csv", "", "a.csv: the file is empty"),
        ("a.csv", "text,n,n\na,1,2\n", "a.csv: the column 'n' occurs 2 times"),
        ("a.parquet", "not parquet", "a.parquet: not a readable Parquet file"),
        ("a.csv", b"text\n\xff\n", "a.csv, line 2: not valid UTF-8"),
        ("a.txt", b"good\nbad \xff\n", r"a.txt, line 2: not valid UTF-8 \(byte 0xff at offset 9\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl, line 2: not valid UTF-8"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read(path)


def test_the_broken_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "a"\n')
    with pytest.raises(DataError, match="broken.jsonl, line 1"):
        read(tmp_path)


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
