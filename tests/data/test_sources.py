"""Every kind of source: files, folders, saved datasets, formats with data_files and URLs; broken files are named."""

import gzip
import json
import os
import re
from functools import partial

import fsspec
import pytest
from datasets import Dataset, DatasetDict

from ebft.data.sources import content_digest, read_source, source_fingerprint
from ebft.data.stream import open_source
from ebft.errors import DataError, told
from tests.config.conftest import warned
from tests.data.conftest import entry

packed = partial(gzip.compress, mtime=0)  # a time would be part of the names of cases, which processes compare
ROWS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
LINE = '{"text": "a"}\n'
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def texts(path, **keys):
    return read_source(entry(path, **keys))["text"][:]


def streamed(path, **keys):
    return [row["text"] for row in open_source(entry(path, **keys))]


@pytest.fixture
def write(tmp_path):
    """`write(name=content)`: files of a folder, as bytes or text; returns the folder."""

    def run(files):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return run


@pytest.mark.parametrize(("name", "content", "keys"), [
    ("rows.json", json.dumps(ROWS), {}),
    ("rows.jsonl", LINES, {}),
    ("rows.csv", "text\none\ntwo\nthree\n", {}),
    ("rows.tsv", "text\tn\none\t1\ntwo\t2\nthree\t3\n", {}),
    ("rows.parquet", None, {}),
    ("rows.tsv.gz", packed(b"text\tn\none\t1\ntwo\t2\nthree\t3\n"), {}),
    ("rows.data", LINES, {"ds_type": "json"}),
])  # fmt: skip
def test_table_files(write, name, content, keys):
    path = write({name: content or ""}) / name
    if content is None:
        Dataset.from_list(ROWS).to_parquet(str(path))
    assert texts(path, **keys) == streamed(path, **keys) == ["one", "two", "three"]


@pytest.mark.parametrize(("files", "expected"), [
    ({"book.txt": "line one\n\nline two\n"}, ["line one\n\nline two\n"]),  # one document
    ({name: name for name in ("b.py", "a.py", "sub/test.py", "__pycache__/a.pyc", ".hidden/x.py")},
     ["a.py", "b.py", "sub/test.py"]),
    ({"rows.jsonl": LINES, "code.py": "pass"}, ["one", "pass", "three", "two"]),
    ({"README.md": "read", "code.py": "pass", "LICENSE": "free"}, ["pass", "read"]),
    ({"a.txt.gz": packed(b"line one\n\nline two\n")}, ["line one\n\nline two\n"]),
    ({"a.jsonl": '{"text": "a", "m": {"timestamp": 5}}\n{"text": "b", "m": {"timestamp": "x"}}\n'}, ["a", "b"]),
])  # fmt: skip
def test_folders(write, files, expected):
    assert sorted(texts(write(files))) == expected


def test_fields_of_a_csv_file_are_its_texts(write):
    """Whatever the first rows and files have; columns of nothing else are numbers. At a URL, and of tabs, too."""
    folder = write({"a.csv": "text,n\nParis,1\n", "b.csv": "n,text\n2,007\n,1.50\n-3,True\n4,1e3\n"})
    rows = read_source(entry(folder))
    assert rows["text"] == ["Paris", "007", "1.50", "True", "1e3"] and rows["n"] == [1, 2, None, -3, 4]
    write({"late.csv": "text,zip\n" + "word,02139\n" * 10_000 + "007,10001\n"})
    assert read_source(entry(folder / "late.csv"))[-1] == {"text": "007", "zip": "10001"}
    assert read_source(entry(f"file://{folder / 'late.csv'}"))[-1] == {"text": "007", "zip": "10001"}
    write({"tabs/c.tsv": "text\tn\nNA, no\t1\n", "tabs/d.csv": "text,n\nnull,0.5\n"})
    assert list(read_source(entry(folder / "tabs"))) == [{"text": "NA, no", "n": 1.0}, {"text": "null", "n": 0.5}]
    assert list(read_source(entry(f"file://{folder}/tabs/c.tsv"))) == [{"text": "NA, no", "n": 1}]
    write({"e.csv": "text,other\na,b\n"})
    with pytest.raises(DataError, match="text, other, but the columns of the first file are text, n"):
        read_source(entry(folder, data_files=["a.csv", "e.csv"]))


def test_only_empty_fields_of_a_csv_file_are_missing(write):
    csv, tsv = "text,n\nNA,1\nnull,2\n,3\n", "country\ttext\nNamibia\tNA\n"
    folder = write({"codes.csv": csv, "CODES.TSV": tsv, "a.data": "NA"})
    assert texts(folder / "codes.csv") == ["NA", "null", None] and texts(folder / "CODES.TSV") == ["NA"]
    assert texts(folder / "a.data", ds_type="text") == ["NA"]
    path = write({"mark.txt": "\ufeffHi"}) / "mark.txt"  # of the byte order
    assert texts(path) == texts(f"file://{path}") == ["Hi"]


def test_files_that_are_left_out_are_named(write):
    folder = write({"a.txt": "text", "the-test-of-time.txt": "", "dev.jsonl": LINES, "b.png": b"\x89"})
    _, found = warned(texts, folder, split="train[:1]")
    assert re.search(r"unknown format are skipped \(.png x1\). Set ds_type or data_files", found[0])
    assert "another split than train[:1]: the-test-of-time.txt (test). Name them" in found[1]


def test_links_to_folders_are_followed(write):
    folder = write({"own/a.txt": "a", "other/b.txt": "b"})
    (folder / "own" / "link").symlink_to(folder / "other")
    (folder / "other" / "back").symlink_to(folder / "own")
    assert texts(folder / "own") == ["a", "b"]


@pytest.mark.parametrize(("files", "path", "keys", "message"), [
    ({"rows.jsonl": LINES}, "rows.jsonl", {"shards": 6}, "shards: 6 is more than its 3 rows"),
    ({"a.jsonl": LINES}, "a.jsonl", {"type": "nemo_gym", "data_files": "a.jsonl"}, "one JSONL file, without data"),
    ({"b.png": b"\x89"}, "", {}, r"no file of a known format \(found .png x1\). Set ds_type"),
    ({"own.py": "class Own(datasets.GeneratorBasedBuilder):\n    pass", "README.md": "Rows."}, "", {},
     "made by its loading script own.py, which is not run"),
    ({"a.txt": packed(b"text")}, "", {}, "not valid UTF-8"),
    ({"a.txt": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, "", {}, "pointer of Git LFS"),
    ({"a.jsonl": LINES}, "a.jsonl", {"split": "train[:1]+train[9:]"}, "a part of it, selects no rows"),
    *(({name: content}, name, {}, f"{name}(?:[:,]| as) ?{message}")
      for name, content, message in (
          ("a.jsonl", LINE * 16 + '{"text": a}\n', r"line 17: not valid JSON \(Expecting value"),
          ("a.jsonl", LINE + '{"m": {"k": 1, "k": 2}}', "line 2: the key 'k' occurs 2 times in an object"),
          ("a.jsonl", '{"n": 1e999}', "line 1: the number 1e999 is too large"),
          ("a.jsonl", LINE + r'{"t": "\uD83D\uDE00 \uD83D"}', "line 2: .* surrogates not allowed"),
          ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: not valid UTF-8"),
          ("a.json", '[{"text": "a"}, 3]', "row 1: a row must be a JSON object, got 3"),
          ("a.json", '[{"text": "a"}]\n{"text": "b"}', "line 1: not valid JSON .text after the end of the list"),
          ("a.json", '[{"text": "a"}, {"text": "b"},', "line 1: not valid JSON .Expecting value"),
          ("a.csv", "text\none, two\nthree\n", "line 2: 2 fields, but the header has 1"),
          ("a.csv", "text,n,n\na,1,2\n", "the column 'n' occurs 2 times"))),
])  # fmt: skip
def test_what_cannot_be_read(write, files, path, keys, message):
    with pytest.raises(Exception) as caught:
        read_source(entry(write(files) / path, **keys))
    assert re.search(message, told(caught.value))


def test_files_named_for_splits(write):
    folder = write({"train-00000.jsonl": LINES, "test.jsonl": '{"text": "held out"}\n'})
    assert texts(folder) == streamed(folder) == ["one", "two", "three"]
    assert texts(folder, split="test") == streamed(folder, split="test") == ["held out"]
    assert texts(folder / "test.jsonl") == streamed(f"file://{folder}/test.jsonl") == ["held out"]
    names = [f"{name}-0000{n}-of-00002" for name in ("sft", "prefs") for n in range(2)]
    folder = write({f"shards/train_{name}.jsonl": LINES for name in names}) / "shards"
    assert texts(folder, split="train_sft") == ["one", "two", "three"] * 2
    with pytest.raises(ValueError, match="Should be one of .*train_prefs.*train_sft"):
        texts(folder)


def test_data_files(write, monkeypatch):
    folder = write({"a.jsonl": LINES, "test.jsonl": LINES})
    assert texts(folder, data_files="*.jsonl") == streamed(folder, data_files="*.jsonl") == ["one", "two", "three"] * 2
    assert streamed("json", data_files=str(folder / "*.jsonl")) == ["one", "two", "three"] * 2
    assert len(texts(folder, data_files={"train": "a.jsonl", "test": ["test.jsonl"]}, split="test")) == 3
    monkeypatch.chdir(folder)
    assert len(texts("json", data_files=["a.jsonl", str(folder / "test.jsonl")])) == 6


def test_saved_datasets(tmp_path):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "plain")
    DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "dict")
    assert texts(tmp_path / "plain") == streamed(tmp_path / "plain") == ["one", "two", "three"]
    assert len(texts(tmp_path / "dict", split="test")) == 1


def test_parts_of_a_dataset(write):
    path = write({"rows.jsonl": LINES}) / "rows.jsonl"
    slices = {"train[:2]": "one two", "train[:34%]": "one", "train[2:9]": "three", "train[:1]+train[2:]": "one three"}
    assert {split: " ".join(texts(path, split=split)) for split in slices} == slices
    assert texts(path, shards=2) == ["one", "three"] and texts(path, shards=2, shards_idx=1) == ["two"]


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_a_changed_file_with_an_unchanged_time_is_read_again(tmp_path, kind):
    found, path = [], tmp_path / f"rows.{kind}"
    for text in ("one", "two"):
        getattr(Dataset.from_dict({"text": [text]}), f"to_{kind}")(str(path))
        os.utime(path, ns=(10**18, 10**18))
        found += texts(path)
    assert found == ["one", "two"]


def test_files_at_urls(tmp_path):
    name, files = f"bucket-{tmp_path.name}-{abs(hash(tmp_path))}", fsspec.filesystem("memory")  # cached by their URL
    files.pipe(f"/{name}/rows.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    files.pipe(f"/{name}/more.jsonl", b'{"text": "d"}\n')
    files.pipe(f"/{name}/notes.txt", b"one\ntwo\n")
    bucket = f"memory://{name}"
    assert texts(f"{bucket}/rows.jsonl") == ["a", "b", "c"]
    assert texts(f"{bucket}/rows.jsonl", split="train[:1]") == ["a"]
    assert texts(bucket, data_files=["rows.jsonl", "more.jsonl"]) == ["a", "b", "c", "d"]
    assert texts(bucket, data_files={"test": "more.jsonl"}, split="test") == ["d"]
    assert texts(f"{bucket}/notes.txt") == ["one\ntwo\n"]
    rows, more = (entry(f"{bucket}/{name}.jsonl") for name in ("rows", "more"))
    assert source_fingerprint(rows) == source_fingerprint(rows) != source_fingerprint(more)
    assert content_digest(rows) is None


@pytest.mark.parametrize(("content", "rows"), [
    ('\n{"text": "a \\ud83d\\ude00"}\n\n{"text": "b"} {"text": "c"}\nnull\n', ["a \U0001f600", "b", "c", None]),
    ('{\n"text": "a"}\n{"text": "b"}', ["a", "b"]),
    ('[{"text": "a"}, null,\n{"text": "b"}]\n', ["a", None, "b"]),
    ('["a", "b"]', ["a", "b"]),
    ('{\n"text": "a"\n}\n', ["a"]),
    ('\ufeff{"text": "a"}', ["a"]),
])  # fmt: skip
def test_shapes_of_json(tmp_path, content, rows):
    (tmp_path / "a.json").write_text(content)
    assert texts(tmp_path / "a.json") == rows


def test_streams(write):
    folder = write({"a.txt": "a\r\n\r\nb", "b.txt": "c", "bad/a.jsonl": "no json\n"})
    assert streamed(folder, data_files="*.txt") == texts(folder, data_files="*.txt") == ["a\r\n\r\nb", "c"]
    with pytest.raises(DataError, match="a.jsonl, line 1: not valid JSON"):
        open_source(entry(folder / "bad"))  # before it is read
    with pytest.raises(DataError, match="a stream reads files of one format, but there are json, text"):
        open_source(entry(folder))
