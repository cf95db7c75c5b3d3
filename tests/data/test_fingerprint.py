"""Fingerprints of sources: files by name and content, datasets of the Hub by commit."""

from types import SimpleNamespace

import pytest

from ebft.data.keys import DatasetEntry
from ebft.data.sources import source_files, source_fingerprint
from ebft.errors import DataError
from ebft.files import file_hash


def entry(path, **keys):
    return DatasetEntry.model_validate({"path": str(path), "type": "ebft_pretrain.transform", **keys})


def test_the_files_are_those_that_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", "b.jsonl", "sub/c.txt", ".hidden.jsonl"):
        (tmp_path / name).write_text("{}")
    names = lambda *arguments, **keys: [name for name, _ in source_files(entry(*arguments, **keys))]
    assert names("a.jsonl") == ["a.jsonl"]
    assert names(tmp_path) == ["a.jsonl", "b.jsonl", "sub/c.txt"]
    assert names(tmp_path, data_files="sub/*") == ["sub/c.txt"]
    assert names("json", data_files={"train": "b.jsonl", "test": ["a.jsonl"]}) == ["b.jsonl", "a.jsonl"]
    with pytest.raises(DataError, match="matches no file"):
        names(tmp_path, data_files="*.csv")
    files = source_fingerprint(entry("a.jsonl"))["files"]
    assert files == [["a.jsonl", file_hash(tmp_path / "b.jsonl")]]  # the same content


def test_a_dataset_of_the_hub_is_compared_by_its_commit(monkeypatch, tmp_path):
    commit = "c" * 40
    asked = []

    def snapshot_download(path, **options):
        asked.append((path, options["revision"]))
        return str(tmp_path / "snapshots" / commit)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("ebft.data.sources.snapshot_download", snapshot_download)
    assert source_fingerprint(entry("owner/name", revision="v2")) == {"hub": commit}
    assert asked == [("owner/name", "v2")]


def test_the_commit_of_the_local_cache_is_used_offline(monkeypatch, tmp_path):
    commit, folder = "d" * 40, tmp_path / "datasets--owner--name"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from functools import partial

    from huggingface_hub import snapshot_download

    cached = partial(snapshot_download, cache_dir=tmp_path)
    monkeypatch.setattr("ebft.data.sources.snapshot_download", cached)
    assert source_fingerprint(entry("owner/name")) == {"hub": commit}


def test_a_dataset_whose_commit_is_unknown_is_compared_by_its_own_fingerprint(monkeypatch):
    def unknown(*arguments, **options):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("ebft.data.sources.snapshot_download", unknown)
    monkeypatch.setattr("ebft.data.sources.read_source", lambda entry: SimpleNamespace(_fingerprint="f00"))
    assert source_fingerprint(entry("owner/name")) == {"hub": "f00"}
