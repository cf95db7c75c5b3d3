"""What changes the key of prepared rows, and what does not."""

import json
import sys

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


def test_irrelevant_settings_keep_the_key(key_for, tmp_path):
    same = {"learning_rate": 0.5, "output_dir": str(tmp_path / "b"), "ebft": {"stride": 2}, "sample_packing": True}
    assert key_for(**same) == key_for() == key_for()


@pytest.mark.parametrize(
    "keys",
    [
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
    ],
)
def test_settings_that_determine_rows_change_the_key(key_for, keys):
    assert key_for(**keys) != key_for()


def test_the_contents_of_files_change_the_key_and_their_times_do_not(key_for, rows_file):
    before, text = key_for(), rows_file.read_text()
    rows_file.write_text(text.replace("answer", "Answer"))
    assert key_for() != before
    rows_file.unlink()
    rows_file.write_text(text)
    assert key_for() == before


def test_a_large_file_is_compared_by_its_time(key_for, rows_file, monkeypatch):
    import os

    monkeypatch.setattr("ebft.files.LARGEST_HASHED", 10)
    before = key_for()
    assert key_for() == before
    os.utime(rows_file, ns=(1, 1))
    assert key_for() != before


def test_a_file_in_a_folder_changes_the_key(key_for, rows_file, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(rows_file.read_text())
    datasets = [{"path": str(folder), "type": "ebft_pretrain.transform"}]
    before = key_for(datasets=datasets)
    (folder / "more.jsonl").write_text(json.dumps({"text": "more " * 20}))
    more = key_for(datasets=datasets)
    (folder / "more.jsonl").rename(folder / "test.jsonl")  # another split
    assert len({before, more, key_for(datasets=datasets)}) == 3


def test_the_source_of_a_custom_transform_and_of_its_imports_changes_the_key(key_for, own_transform):
    of = lambda **code: key_for(datasets=[{"path": "rows.jsonl", "type": own_transform(**code)}])
    assert of() == of()
    assert len({of(), of(answer="example['input']"), of(helper="SUFFIX = '?'")}) == 3


def test_a_local_module_with_the_name_of_one_of_pythons_library_changes_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_with_turtle.py").write_text("import json, turtle\n\ndef transform(cfg):\n    return turtle.NAME\n")
    (tmp_path / "turtle.py").write_text("NAME = 'a'\n")
    found = prepared_rows.transform_sources(["own_with_turtle.transform"])
    assert set(found) == {"own_with_turtle", "turtle"} and found["turtle"] == "NAME = 'a'\n"
    for name in found:
        del sys.modules[name]


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfimport own_encoded_helper\n",
        "# coding: latin-1\nimport own_encoded_helper  # \xe9\n".encode("latin-1"),
    ],
)
def test_the_source_of_a_transform_in_another_encoding(tmp_path, monkeypatch, content):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_encoded.py").write_bytes(content + b"\ndef transform(cfg):\n    return None\n")
    (tmp_path / "own_encoded_helper.py").write_text("")
    found = prepared_rows.transform_sources(["own_encoded.transform"])
    assert set(found) == {"own_encoded", "own_encoded_helper"} and "import own_encoded_helper" in found["own_encoded"]
    for name in found:
        del sys.modules[name]


def test_a_setting_that_a_custom_transform_reads_changes_the_key(key_for, own_transform):
    datasets = [{"path": "rows.jsonl", "type": own_transform()}]
    assert key_for(datasets=datasets) == key_for(datasets=datasets, learning_rate=0.5)
    datasets = [{"path": "rows.jsonl", "type": own_transform(answer="str(cfg.learning_rate)")}]
    assert key_for(datasets=datasets) != key_for(datasets=datasets, learning_rate=0.5)


def test_the_code_of_built_in_transforms_changes_the_key(key_for, monkeypatch, tmp_path):
    before = key_for()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "load.py").write_text("changed")
    monkeypatch.setattr(prepared_rows, "_PACKAGE", tmp_path)
    assert key_for() != before


def test_the_version_of_a_library_changes_the_key(key_for, monkeypatch):
    before = key_for()
    monkeypatch.setattr(prepared_rows, "version", lambda name: "another")
    assert key_for() != before


def test_a_copy_of_the_tokenizer_elsewhere_keeps_the_key(key_for, tiny_llama_dir, tmp_path):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(tiny_llama_dir, folder)
    assert key_for(base_model=str(folder)) == key_for()
    text = (folder / "tokenizer.json").read_text().replace("<|begin|>", "<|start|>")
    (folder / "tokenizer.json").write_text(text)
    assert key_for(base_model=str(folder)) != key_for()


def test_values_that_are_not_json_are_in_the_key(key_for):
    from datetime import date

    of = lambda day: key_for("structured", trl={"chat_template_kwargs": {"date": date(2026, 1, day), "on": True}})
    assert of(1) == of(1) != of(2)


def test_missing_data_is_an_error(key_for):
    with pytest.raises(DataError, match="the local path './nowhere' does not exist"):
        key_for(datasets=[{"path": "./nowhere", "type": "completion"}])


def test_the_key_is_a_folder_name(key_for):
    assert len(key_for()) == 32 and key_for().isalnum() and prepared_rows.FORMAT == 1


def test_a_gguf_tokenizer_has_a_fingerprint(key_for, tiny_gguf):
    of = lambda: key_for(base_model=str(tiny_gguf.parent), gguf_file=tiny_gguf.name)
    assert of() == of()
