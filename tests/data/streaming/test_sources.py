"""Every kind of source as a stream: the rows that it gives, and what is refused."""

import json

import pytest
from datasets import Dataset

from ebft.data.keys import DatasetEntry
from ebft.data.sources import read_source
from ebft.data.stream import open_source
from ebft.errors import DataError

TEXTS = [f"text {number}" for number in range(5)]


def entry(path, **keys):
    return DatasetEntry.model_validate({"path": str(path), "type": "completion", **keys})


def texts(entry):
    return [row["text"] for row in open_source(entry)]


@pytest.fixture
def rows(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, part in (("a.jsonl", TEXTS[:3]), ("b.jsonl", TEXTS[3:])):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


def test_a_file_and_a_folder_of_json_lines(rows):
    assert texts(entry(rows / "a.jsonl")) == TEXTS[:3]
    assert texts(entry(rows)) == TEXTS


def test_data_files_of_a_folder_or_of_a_format(rows):
    assert texts(entry(rows, data_files=["b.jsonl", "a.jsonl"])) == TEXTS[3:] + TEXTS[:3]
    assert texts(entry("json", data_files=str(rows / "*.jsonl"))) == TEXTS


def test_splits_of_a_folder_are_those_of_prepared_datasets(rows):
    (rows / "b.jsonl").rename(rows / "test.jsonl")
    for split in ("train", "test"):
        given = entry(rows, split=split)
        assert texts(given) == read_source(given)["text"][:]


def test_parquet_csv_and_saved_datasets(tmp_path):
    table = Dataset.from_dict({"text": [*TEXTS, "NA"]})
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.to_csv(str(tmp_path / "rows.csv"), index=False)
    table.save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.parquet", "rows.csv", "saved"):
        assert texts(entry(tmp_path / name)) == [*TEXTS, "NA"], name


def test_a_text_file_is_one_document(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name}\n\nof two paragraphs")
    assert texts(entry(tmp_path)) == ["a.txt\n\nof two paragraphs", "b.txt\n\nof two paragraphs"]


def test_urls_are_not_downloaded_as_a_whole(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert texts(entry(f"file://{tmp_path}/rows.jsonl")) == TEXTS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "validation"}, "no split 'validation'. Available splits: train"),
        ({"data_files": "c.jsonl"}, "data_files 'c.jsonl' matches no file"),
        ({"path": "no/such/file.jsonl"}, "datasets.path: the local path 'no/such/file.jsonl' does not exist"),
    ],
)
def test_a_source_that_does_not_exist(rows, change, message):
    with pytest.raises(DataError, match=message):
        open_source(entry(**{"path": rows, **change}))


def test_files_of_several_formats_are_refused(rows):
    (rows / "c.txt").write_text("text")
    with pytest.raises(DataError, match="a stream reads files of one format, but there are json, text"):
        open_source(entry(rows))


def test_a_file_that_is_no_table_is_refused_before_it_is_read(rows):
    (rows / "a.jsonl").write_text("no json\n")
    with pytest.raises(DataError, match="a.jsonl, line 1: not valid JSON"):
        open_source(entry(rows))
