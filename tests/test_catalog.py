"""Paths and hub ids told apart, and fingerprints of sources; the hub is replaced by what it would answer."""

from functools import partial
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError

from ebft.catalog import locate
from ebft.data.sources import source_files, source_fingerprint
from ebft.errors import DataError, ModelError
from ebft.files import file_hash
from tests.data.conftest import entry


@pytest.fixture
def hub(monkeypatch):
    """`hub(error)` makes every question to the hub raise it, `hub(None)` answers every one; returns the questions."""
    asked = []

    def install(error=None, offline=False):
        def answer(self, repo_id, **kwargs):
            asked.append((repo_id, kwargs["timeout"]))
            if error is not None:
                raise error

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", answer)
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", answer)
        return asked

    return install


def test_paths_are_not_looked_up(tmp_path, monkeypatch, hub):
    asked = hub()
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("owner/name", "model", "base_model").is_dir()
    with pytest.raises(ModelError, match="base_model: the local path './gone' does not exist"):
        locate("./gone", "model", "base_model")
    assert not asked


def test_hub_id_that_exists(hub):
    asked = hub()
    assert locate("owner/name", "dataset", "datasets.path") is None and asked == [("owner/name", 5.0)]
    hub(offline=True)  # the cache is left to the library
    assert locate("owner/name", "dataset", "datasets.path") is None and len(asked) == 1


NO_ROUTE, BAD_ID = OSError("no route"), HFValidationError("bad id")


@pytest.mark.parametrize(("error", "name", "kind", "raised", "message"), [
    (NO_ROUTE, "owner/name", "dataset", DataError,
     "the Hub cannot be reached .no route.. Use a local path, .* or set HF_HUB_OFFLINE=1"),
    (BAD_ID, "smollm2-135", "model", ModelError,
     r"a Hub id \(`ebft fetch` provides smollm2-135m\), but there is no such model"),
])  # fmt: skip
def test_hub_that_says_no(hub, error, name, kind, raised, message):
    hub(error)
    with pytest.raises(raised, match=message):
        locate(name, kind, {"model": "base_model", "dataset": "datasets.path"}[kind])


def test_the_files_of_a_fingerprint_are_those_that_are_read(tmp_path, monkeypatch):
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
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit, asked, folder = "c" * 40, [], tmp_path / "datasets--owner--name"

    def download(path, **options):
        asked.append((path, options["revision"]))
        return str(tmp_path / "snapshots" / commit)

    def unknown(*arguments, **options):
        raise OSError("offline")

    monkeypatch.setattr("ebft.data.sources.snapshot_download", download)
    assert source_fingerprint(entry("owner/name", revision="v2")) == {"hub": commit}
    assert asked == [("owner/name", "v2")]
    (folder / "snapshots" / commit).mkdir(parents=True)  # of the local cache
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr("ebft.data.sources.snapshot_download", partial(snapshot_download, cache_dir=tmp_path))
    assert source_fingerprint(entry("owner/name")) == {"hub": commit}
    monkeypatch.setattr("ebft.data.sources.snapshot_download", unknown)
    monkeypatch.setattr("ebft.data.sources.read_source", lambda entry: SimpleNamespace(_fingerprint="f00"))
    assert source_fingerprint(entry("owner/name")) == {"hub": "f00"}
