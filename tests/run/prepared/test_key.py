"""What changes the key of prepared rows, and what does not."""

import importlib
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from textwrap import dedent

import pytest

import ebft
from ebft.config.section import Section
from ebft.files import json_hash
from ebft.models.pretrained import load_tokenizer
from ebft.run import prepared_rows
from ebft.run.config.reference import option_groups
from ebft.run.prepared_rows import IDLE, row_inputs, row_settings
from tests.data.conftest import simple

KEYS = [option.key for options in option_groups().values() for option in options]


@pytest.fixture
def key_for(make):
    """`key_for(**keys)`: the key of a config with these keys."""

    def of(method="strided", **keys):
        config = make(method, **keys)
        return json_hash(row_inputs(config, load_tokenizer(config)))

    return of


def changed(section, path, value):
    """A copy of a section in which the key at `path` has another value, unchecked."""
    name, _, rest = path.partition(".")
    if not rest:
        return section.model_copy(update={name: value})
    inner = getattr(section, name)
    if isinstance(inner, list):
        inner = [changed(inner[0], rest.partition(".")[2], value), *inner[1:]]
    elif isinstance(inner, Section):
        inner = changed(inner, rest, value)
    else:
        inner = {rest: value}
    return section.model_copy(update={name: inner})


def test_every_key_is_of_an_idle_group_or_changes_the_settings(make, rows_file):
    entry = {"path": str(rows_file), "type": "ebft_strided_structured.transform_prompts"}
    gym = [{"path": "x", "server_name": "y"}]
    with warnings.catch_warnings(action="ignore"):
        config = make("grpo", nemo_gym_datasets=gym, test_datasets=[entry], val_set_size=0)
        before = row_settings(config)
        same = {key for key in KEYS if row_settings(changed(config, key, [] if key == "datasets" else 123)) == before}
    assert same == {key for key in KEYS if key.partition(".")[0] in IDLE}
    assert {"learning_rate", "output_dir", "base_model", "lora_r"} < same


def test_the_code_that_makes_rows_reads_no_idle_key():
    found = (Path(ebft.__file__).parent / "data").rglob("*.py")
    files = [path for path in found if path.name != "stream.py"]  # streams, whose rows are not stored
    read = {found for path in files for found in re.findall(r"\b(?:cfg|config)\.([a-z_]+)", path.read_text())}
    # The number of processes; the name of the template in an error message.
    assert len(files) > 20 and read & IDLE == {"dataset_num_proc", "chat_template"}


def test_an_idle_key_that_a_custom_transform_mentions_is_included(make):
    settings = lambda *sources, **keys: row_settings(make(**keys), sources)
    assert "learning_rate" not in settings() and "dataset_num_proc" not in settings()
    assert settings("scale = cfg['learning_rate']")["learning_rate"] == 1e-3
    assert "budget.documents" in settings("cfg.budget.documents")
    assert "dataset_num_proc" in settings("return f, {'batched': True}")
    assert settings(train_on_inputs=False) == settings()  # a default that is set


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


def test_the_source_of_a_custom_transform_and_of_its_imports_changes_the_key(key_for, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = '{{"input_ids": (ids := tokenizer(example["input"] + {} + SUFFIX)["input_ids"]), "labels": ids}}'

    def of(answer='example["output"]', helper="SUFFIX = '!'", **keys):
        code = f"from own_helper import SUFFIX\n{dedent(simple(row.format(answer)))}"
        for module, text in (("own_helper", helper), ("own_rows", code)):
            (tmp_path / f"{module}.py").write_text(text)
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        return key_for(datasets=[{"path": "rows.jsonl", "type": "own_rows.transform"}], **keys)

    assert of() == of() == of(learning_rate=0.5)
    assert len({of(), of(answer='example["input"]'), of(helper="SUFFIX = '?'")}) == 3
    rate = "str(cfg.learning_rate)"
    assert of(rate) != of(rate, learning_rate=0.5)


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
    """A copy elsewhere keeps the key, another vocabulary changes it, and one of a GGUF file has a key."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny_llama_dir, folder)
    assert key_for(base_model=str(folder)) == key_for()
    text = (folder / "tokenizer.json").read_text().replace("<|begin|>", "<|start|>")
    (folder / "tokenizer.json").write_text(text)
    assert key_for(base_model=str(folder)) != key_for()
    of_gguf = lambda: key_for(base_model=str(tiny_gguf.parent), gguf_file=tiny_gguf.name)
    assert of_gguf() == of_gguf()
