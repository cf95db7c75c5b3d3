"""Every kind of source as a stream: the rows that it gives, and what is refused."""

import json

import pytest
from datasets import Dataset

from ebft.config.keys.data import DatasetEntry
from ebft.data.sources import read_source
from ebft.data.stream import open_source
from ebft.errors import DataError

TEXTS = [f"text {number}" for number in range(5)]


def entry(path, **keys):
    return DatasetEntry.model_validate({"path": str(path), "type": "completion", **keys})


def texts(path, **keys):
    return [row["text"] for row in open_source(entry(path, **keys))]


@pytest.fixture
def rows(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, part in (("a.jsonl", TEXTS[:3]), ("b.jsonl", TEXTS[3:])):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


def test_files_of_json_lines(rows):
    assert texts(rows / "a.jsonl") == texts(f"file://{rows}/a.jsonl") == TEXTS[:3]  # URLs are not downloaded
    assert texts(rows) == texts("json", data_files=str(rows / "*.jsonl")) == TEXTS
    assert texts(rows, data_files=["b.jsonl", "a.jsonl"]) == TEXTS[3:] + TEXTS[:3]
    (rows / "b.jsonl").rename(rows / "test.jsonl")
    for split in ("train", "test"):
        assert texts(rows, split=split) == read_source(entry(rows, split=split))["text"][:]


def test_other_formats(tmp_path):
    table = Dataset.from_dict({"text": [*TEXTS, "NA"]})
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.to_csv(str(tmp_path / "rows.csv"), index=False)
    table.save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.parquet", "rows.csv", "saved"):
        assert texts(tmp_path / name) == [*TEXTS, "NA"], name
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_bytes(f"{name}\r\n\r\nof two paragraphs".encode())
    assert texts(tmp_path / "texts") == ["a.txt\r\n\r\nof two paragraphs", "b.txt\r\n\r\nof two paragraphs"]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("", {"split": "validation"}, "no split 'validation'. Available splits: train"),
        ("c.txt", {}, "a stream reads files of one format, but there are json, text"),
        ("a.jsonl", {}, "a.jsonl, line 1: not valid JSON"),  # before it is read
    ],
)
def test_sources_that_are_refused(rows, file, change, message):
    if file:
        (rows / file).write_text("no json\n")
    with pytest.raises(DataError, match=message):
        open_source(entry(**{"path": rows, **change}))
