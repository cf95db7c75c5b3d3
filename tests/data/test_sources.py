"""Every kind of source: files, folders, saved datasets, formats with data_files, and hub ids without a hub."""

import gzip
import json
import os

import pytest
from datasets import Dataset, DatasetDict

from ebft.data.keys import DatasetEntry
from ebft.data.sources import read_source
from ebft.errors import DataError


def entry(path, **keys):
    return DatasetEntry.model_validate({"path": str(path), "type": "ebft_pretrain.transform", **keys})


ROWS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]


def write(path, kind):
    table = Dataset.from_list(ROWS)
    if kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "csv":
        path.write_text("text\none\ntwo\nthree\n")
    elif kind == "tsv":
        path.write_text("text\tn\none\t1\ntwo\t2\nthree\t3\n")
    else:
        table.to_parquet(str(path))
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "tsv", "parquet"])
def test_table_files(tmp_path, kind):
    path = write(tmp_path / f"rows.{kind}", kind)
    assert read_source(entry(path))["text"][:] == ["one", "two", "three"]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_strings_of_json_that_look_like_dates_stay_strings(tmp_path, kind):
    rows = [
        {"n": 1, "answer": "2024-01-01", "turns": [{"content": "2024-01-02T10:00:00"}]},
        {"n": 2, "answer": None, "turns": [{"content": "2024-01-03"}, {"content": "2024-01-04"}]},
    ]
    lines = "".join(json.dumps(row) + "\n\n" for row in rows)
    (tmp_path / f"rows.{kind}").write_text(json.dumps(rows, indent=1) if kind == "json" else lines)
    (tmp_path / f"more.{kind}").write_text(json.dumps(rows[:1]) if kind == "json" else json.dumps(rows[0]))
    found = read_source(entry(tmp_path, data_files=[f"rows.{kind}", f"more.{kind}"]))
    assert list(found) == [*rows, rows[0]]


def test_a_key_named_timestamp_is_left_to_the_reader(tmp_path):
    rows = [{"text": "a", "meta": {"timestamp": 5}}, {"text": "b", "meta": {"timestamp": "x"}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_source(entry(tmp_path / "rows.jsonl"))["text"][:] == ["a", "b"]


def test_ds_type_overrules_the_ending(tmp_path):
    path = write(tmp_path / "rows.data", "jsonl")
    assert read_source(entry(path, ds_type="json"))["text"][:] == ["one", "two", "three"]
    assert len(read_source(entry(path, ds_type="text"))) == 1


def test_text_file_is_one_document(tmp_path):
    (tmp_path / "book.txt").write_text("line one\n\nline two\n")
    rows = read_source(entry(tmp_path / "book.txt"))
    assert rows["text"][:] == ["line one\n\nline two\n"]


def test_folder_of_source_code(tmp_path):
    for name in ("b.py", "a.py", "sub/test.py", "__pycache__/a.pyc", ".hidden/x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    assert read_source(entry(tmp_path))["text"][:] == ["# a.py", "# b.py", "# sub/test.py"]


def test_mixed_folder(tmp_path):
    write(tmp_path / "rows.jsonl", "jsonl")
    (tmp_path / "code.py").write_text("pass")
    assert sorted(read_source(entry(tmp_path))["text"]) == ["one", "pass", "three", "two"]


def test_folder_whose_files_disagree(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.csv").write_text("text\n1\n")
    with pytest.raises(DataError, match="a column has different types in its files"):
        read_source(entry(tmp_path))


def test_unknown_endings_are_left_out_with_a_warning(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.png").write_bytes(b"\x89")
    with pytest.warns(UserWarning, match=r"unknown format are skipped \(.png x1\). Set ds_type or data_files"):
        assert len(read_source(entry(tmp_path))) == 1


def test_only_unknown_endings(tmp_path):
    (tmp_path / "b.png").write_bytes(b"\x89")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder has no files"):
        read_source(entry(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"no file of a known format \(found .png x1\). Set ds_type"):
        read_source(entry(tmp_path))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.zip"])
@pytest.mark.parametrize("keys", [{}, {"ds_type": "json"}])
def test_compressed_files_are_refused(name, keys, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(DataError, match=f"{name} is compressed.* Unpack it"):
        read_source(entry(tmp_path / name, **keys))


def test_files_named_for_splits(tmp_path):
    write(tmp_path / "train-00000.jsonl", "jsonl")
    (tmp_path / "test.jsonl").write_text('{"text": "held out"}\n')
    assert read_source(entry(tmp_path))["text"][:] == ["one", "two", "three"]
    assert read_source(entry(tmp_path, split="test"))["text"][:] == ["held out"]
    assert read_source(entry(tmp_path / "test.jsonl"))["text"][:] == ["held out"]


def test_data_files(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", "jsonl")
    write(tmp_path / "test.jsonl", "jsonl")
    assert len(read_source(entry(tmp_path, data_files="*.jsonl"))) == 6
    assert len(read_source(entry(tmp_path, data_files={"train": "a.jsonl", "test": ["test.jsonl"]}, split="test"))) == 3
    monkeypatch.chdir(tmp_path)
    assert len(read_source(entry("json", data_files=["a.jsonl", str(tmp_path / "test.jsonl")]))) == 6
    with pytest.raises(DataError, match="data_files 'b.jsonl' matches no file in"):
        read_source(entry(tmp_path, data_files="b.jsonl"))


def test_saved_datasets(tmp_path):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "plain")
    DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "dict")
    assert len(read_source(entry(tmp_path / "plain", split="train[:2]"))) == 2
    assert len(read_source(entry(tmp_path / "dict", split="test"))) == 1


@pytest.mark.parametrize(
    ("split", "texts"),
    [
        ("train[:2]", ["one", "two"]),
        ("train[1:2]", ["two"]),
        ("train[:34%]", ["one"]),
        ("train[-1:]", ["three"]),
        ("train[:100]", ["one", "two", "three"]),
        ("train[:1]+train[2:]", ["one", "three"]),
    ],
)
def test_slices(tmp_path, split, texts):
    path = write(tmp_path / "rows.jsonl", "jsonl")
    assert read_source(entry(path, split=split))["text"][:] == texts


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("validation", "Available splits: train"),
        ("train[:x]", "Slices are written"),
        ("train[:1%]", r"selects no rows \(train has 3 rows\). Widen the slice"),
    ],
)
def test_impossible_slices(tmp_path, split, message):
    path = write(tmp_path / "rows.jsonl", "jsonl")
    with pytest.raises(DataError, match=message):
        read_source(entry(path, split=split))


def test_missing_local_path():
    with pytest.raises(DataError, match="the local path './nowhere.jsonl' does not exist"):
        read_source(entry("./nowhere.jsonl"))


def test_hub_id_without_network_fails_at_once(monkeypatch):
    def unreachable(self, repo_id, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    with pytest.raises(
        DataError, match="'nvidia/OpenCodeInstruct' is not a local path.*interpreted as a Hub id.*cannot be reached"
    ):
        read_source(entry("nvidia/OpenCodeInstruct"))


def test_only_empty_fields_of_a_csv_file_are_missing(tmp_path):
    (tmp_path / "codes.csv").write_text("country,code\nNamibia,NA\nnowhere,null\nnothing,\n")
    assert read_source(entry(tmp_path / "codes.csv"))["code"][:] == ["NA", "null", None]
    (tmp_path / "CODES.TSV").write_text("country\tcode\nNamibia\tNA\n")
    assert read_source(entry(tmp_path / "CODES.TSV"))["code"][:] == ["NA"]


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_a_changed_file_with_an_unchanged_time_is_read_again(tmp_path, kind):
    texts = []
    for text in ("one", "two"):
        path = tmp_path / f"rows.{kind}"
        table = Dataset.from_dict({"text": [text]})
        {"json": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[kind](str(path))
        os.utime(path, ns=(10**18, 10**18))
        texts += read_source(entry(path))["text"][:]
    assert texts == ["one", "two"]
