"""Files at URLs, and parts of a dataset."""

import fsspec
import pytest

from ebft.data.keys import DatasetEntry
from ebft.data.sources import content_digest, read_source, source_fingerprint
from ebft.errors import DataError


@pytest.fixture
def bucket(tmp_path):
    """The URL of a folder in memory, which is another one in every test: the library caches files by their URL."""
    name = f"bucket-{tmp_path.name}-{abs(hash(tmp_path))}"
    files = fsspec.filesystem("memory")
    files.pipe(f"/{name}/rows.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    files.pipe(f"/{name}/more.jsonl", b'{"text": "d"}\n')
    files.pipe(f"/{name}/notes.txt", b"one\ntwo\n")
    yield f"memory://{name}"
    files.rm(f"/{name}", recursive=True)


def texts(**keys):
    return read_source(DatasetEntry(type="completion", **keys))["text"][:]


def test_files_at_urls(bucket):
    assert texts(path=f"{bucket}/rows.jsonl") == ["a", "b", "c"]
    assert texts(path=f"{bucket}/rows.jsonl", split="train[:1]") == ["a"]
    assert texts(path=bucket, data_files=["rows.jsonl", "more.jsonl"]) == ["a", "b", "c", "d"]
    assert texts(path=bucket, data_files={"test": "more.jsonl"}, split="test") == ["d"]
    assert texts(path=f"{bucket}/notes.txt") == ["one\ntwo\n"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt"])
def test_urls_of_local_files(tmp_path, name):
    (tmp_path / name).write_text({"rows.jsonl": '{"text": "a"}', "rows.csv": "text\na\n", "rows.txt": "a"}[name])
    assert texts(path=f"file://{tmp_path}/{name}") == ["a"]
    assert texts(path=f"file://{tmp_path}", data_files=name) == ["a"]


def test_urls_have_fingerprints(bucket):
    rows, more = (DatasetEntry(type="completion", path=f"{bucket}/{name}.jsonl") for name in ("rows", "more"))
    assert source_fingerprint(rows) == source_fingerprint(rows) != source_fingerprint(more)
    assert content_digest(rows) is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://nowhere/rows.jsonl", "datasets.path: memory://nowhere/rows.jsonl cannot be read .*Check the URL"),
        ("memory://nowhere/rows", "the format of memory://nowhere/rows is not known. Set ds_type to one of json"),
        ("nothing://bucket/rows.jsonl", "cannot be read .*Protocol not known: nothing"),
    ],
)
def test_urls_that_cannot_be_read(path, message):
    with pytest.raises(DataError, match=message):
        texts(path=path)


def test_a_missing_package_is_named(monkeypatch):
    def refuse(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("ebft.data.sources.load_dataset_builder", refuse)
    with pytest.raises(DataError, match="s3://b/rows.jsonl needs another package: Install s3fs to access S3"):
        texts(path="s3://b/rows.jsonl")


def test_parts_of_a_dataset(write_jsonl):
    path = str(write_jsonl([{"text": letter} for letter in "abcde"]))
    assert texts(path=path, shards=2) == ["a", "c", "e"]
    assert texts(path=path, shards=2, shards_idx=1) == ["b", "d"]
    with pytest.raises(DataError, match="shards: 6 is more than its 5 rows"):
        texts(path=path, shards=6)
