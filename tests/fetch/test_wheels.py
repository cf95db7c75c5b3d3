"""A pinned wheel: downloaded once, checked by its sha256, and nothing half-made is left."""

import multiprocessing
import subprocess

import pytest

from ebft.errors import FetchError
from ebft.tools.fetch import fetch_wheel
from tests.fetch.wheel_files import copy_without_pip, make_wheel, use_folder_as_index


@pytest.fixture
def tiny_wheel(tmp_path, monkeypatch):
    """A wheel that is copied instead of downloaded, and its sha256; no cache yet."""
    wheel, sha256 = make_wheel(tmp_path / "index", "tinydata", "0.3", {"tinydata/words.txt": b"one two"})
    copy_without_pip(monkeypatch, wheel)
    monkeypatch.setenv("EBFT_CACHE", str(tmp_path / "cache"))
    return wheel, sha256


def test_processes_at_once_download_a_wheel_once(tiny_wheel, tmp_path, monkeypatch):
    wheel, sha256 = tiny_wheel
    use_folder_as_index(monkeypatch, wheel.parent)  # of pip, which the processes run
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.starmap(fetch_wheel, [("tinydata", "0.3", sha256)] * 2)
    assert set(found) == {tmp_path / "cache" / "wheels" / "tinydata-0.3" / wheel.name}
    assert found[0].read_bytes() == wheel.read_bytes()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded a second time"))
    assert fetch_wheel("tinydata", "0.3", sha256) == found[0]


def test_what_is_not_the_wheel_is_refused_or_replaced(tiny_wheel, tmp_path):
    wheel, sha256 = tiny_wheel
    with pytest.raises(FetchError, match=f"its sha256 is {sha256}, expected 0000"):
        fetch_wheel("tinydata", "0.3", "0" * 64)
    assert list((tmp_path / "cache").rglob("*.whl")) == []
    partial = tmp_path / "cache" / "wheels" / ".tinydata-0.3.partial"  # of a download that was killed
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "other-1.0-py3-none-any.whl").write_bytes(b"half")
    found = fetch_wheel("tinydata", "0.3", sha256)
    assert found.read_bytes() == wheel.read_bytes() and not partial.exists()
    found.write_bytes(found.read_bytes()[:100])
    assert fetch_wheel("tinydata", "0.3", sha256).read_bytes() == wheel.read_bytes()
