"""What changes the key of prepared rows, and what does not."""

import json
import os
import shutil
import sys
from datetime import date

import pytest

from ebft.errors import DataError
from ebft.models.tokenizer import load_tokenizer
from ebft.run import prepared_rows
from ebft.run.prepared_rows import key_of, row_inputs


@pytest.fixture
def key_for(make):
    """`key_for(**keys)`: the key of a config with these keys."""

    def of(method="strided", **keys):
        config = make(method, **keys)
        return key_of(row_inputs(config, load_tokenizer(config)))

    return of


def test_settings(key_for, tmp_path):
    """Those that determine rows change the key, others do not."""
    plain, same = key_for(), {"output_dir": str(tmp_path / "b"), "ebft": {"stride": 2}, "sample_packing": True}
    assert len(plain) == 32 and plain.isalnum() and prepared_rows.FORMAT == 1  # the name of a folder
    assert key_for(**same, learning_rate=0.5) == plain == key_for()
    for change in (
        {"sequence_len": 48},
        {"seed": 1},
        {"val_set_size": 3},
        {"train_on_inputs": True},
        {"shuffle_merged_datasets": False},
        {"ebft": {"context_length": 5}},
        {"ebft": {"min_completion_prefix": 1}},
        {"method": "sft"},
        {"method": "structured"},
        {"special_tokens": {"pad_token": "<|begin|>"}},
        {"special_tokens": {"pad_token": "<|padding|>"}},
        {"chat_template": "chatml"},
    ):
        assert key_for(**change) != plain, change
    # Values that are not JSON.
    of = lambda day: key_for("structured", trl={"chat_template_kwargs": {"date": date(2026, 1, day), "on": True}})
    assert of(1) == of(1) != of(2)


def test_the_contents_of_files_change_the_key_and_their_times_do_not(key_for, rows_file, monkeypatch):
    before, text = key_for(), rows_file.read_text()
    rows_file.write_text(text.replace("answer", "Answer"))
    assert key_for() != before
    rows_file.unlink()
    rows_file.write_text(text)
    assert key_for() == before
    monkeypatch.setattr("ebft.files.LARGEST_HASHED", 10)  # a large file is compared by its time
    before = key_for()
    assert key_for() == before
    os.utime(rows_file, ns=(1, 1))
    assert key_for() != before


def test_a_file_in_a_folder_changes_the_key(key_for, rows_file, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(rows_file.read_text())
    of_folder = lambda: key_for(datasets=[{"path": str(folder), "type": "ebft_pretrain.transform"}])
    before = of_folder()
    (folder / "more.jsonl").write_text(json.dumps({"text": "more " * 20}))
    more = of_folder()
    (folder / "more.jsonl").rename(folder / "test.jsonl")  # another split
    assert len({before, more, of_folder()}) == 3
    with pytest.raises(DataError, match="the local path './nowhere' does not exist"):
        key_for(datasets=[{"path": "./nowhere", "type": "completion"}])


def test_custom_transforms(key_for, own_transform):
    """Their source, that of their imports, and the settings that they read change the key."""

    def of(answer="example['output']", helper="SUFFIX = '!'", **keys):
        return key_for(datasets=[{"path": "rows.jsonl", "type": own_transform(answer, helper)}], **keys)

    assert of() == of() == of(learning_rate=0.5)
    assert len({of(), of(answer="example['input']"), of(helper="SUFFIX = '?'")}) == 3
    rate = "str(cfg.learning_rate)"
    assert of(rate) != of(rate, learning_rate=0.5)


HELPER = {"own_encoded_helper": b""}


@pytest.mark.parametrize(
    ("content", "others"),
    [
        (b"import json, turtle\n", {"turtle": b"NAME = 'a'\n"}),  # the name of a module of Python's library
        (b"\xef\xbb\xbfimport own_encoded_helper\n", HELPER),
        ("# coding: latin-1\nimport own_encoded_helper  # \xe9\n".encode("latin-1"), HELPER),
    ],
)
def test_the_sources_of_a_transform(tmp_path, monkeypatch, content, others):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in {"own_encoded": content + b"\ndef transform(cfg):\n    return None\n", **others}.items():
        (tmp_path / f"{name}.py").write_bytes(text)
    found = prepared_rows.transform_sources(["own_encoded.transform"])
    assert found.keys() == {"own_encoded", *others} and "import " in found["own_encoded"]
    assert all(found[name] == text.decode() for name, text in others.items())
    for name in found:
        del sys.modules[name]


def test_the_code_and_the_versions_of_libraries_change_the_key(key_for, monkeypatch, tmp_path):
    before = key_for()
    with monkeypatch.context() as patch:
        patch.setattr(prepared_rows, "version", lambda name: "another")
        assert key_for() != before
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "load.py").write_text("changed")
    monkeypatch.setattr(prepared_rows, "_PACKAGE", tmp_path)
    assert key_for() != before


def test_the_tokenizer(key_for, tiny_llama_dir, tiny_gguf, tmp_path):
    """A copy elsewhere keeps the key, another vocabulary changes it, and one of a GGUF file has a fingerprint."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny_llama_dir, folder)
    assert key_for(base_model=str(folder)) == key_for()
    text = (folder / "tokenizer.json").read_text().replace("<|begin|>", "<|start|>")
    (folder / "tokenizer.json").write_text(text)
    assert key_for(base_model=str(folder)) != key_for()
    of_gguf = lambda: key_for(base_model=str(tiny_gguf.parent), gguf_file=tiny_gguf.name)
    assert of_gguf() == of_gguf()
