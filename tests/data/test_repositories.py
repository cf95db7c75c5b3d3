"""Folders that are repositories of datasets: configurations, splits and files are those of their card or layout."""

import json
import re

import pytest
from datasets import Dataset

from ebft.data.sources import read_source, source_files, source_fingerprint
from ebft.data.stream import open_source
from ebft.errors import told
from tests.data.conftest import entry

CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train_prefs
    path: data/train_prefs-*
  - split: test_prefs
    path: data/test_prefs-*
- config_name: sft
  data_files: data/train_sft-*
---
# Rows
"""
OPTIONS = (
    "---\nconfigs:\n- config_name: a\n  data_files: a.csv\n  sep: ';'\n- config_name: b\n  data_files: b.csv\n---\n"
)
TYPES = "---\ndataset_info:\n  features:\n  - name: text\n    dtype: string\n---\n"
PARTS = ("train_prefs", "train_sft", "test_prefs")
SHARDS = {f"data/{part}-0000{n}-of-00002.parquet": [f"{part} {n}"] for part in PARTS for n in range(2)}
CLONE = {"README.md": CARD, "LICENSE": "free", **SHARDS}
TABLES = {"train.jsonl": ["a", "b"], "test.jsonl": ["t"]}


@pytest.fixture
def make(tmp_path):
    """`make(files)`: a folder of these files, whose rows are lists of texts."""

    def run(files):
        for name, content in files.items():
            path = tmp_path / "clone" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.write_text(content)
            elif path.suffix == ".parquet":
                Dataset.from_dict({"text": content}).to_parquet(path)
            else:
                path.write_text("".join(json.dumps({"text": text}) + "\n" for text in content))
        return tmp_path / "clone"

    return run


@pytest.mark.parametrize(("files", "keys", "expected"), [
    (CLONE, {"split": "train_prefs"}, ["train_prefs 0", "train_prefs 1"]),
    (CLONE, {"name": "sft"}, ["train_sft 0", "train_sft 1"]),
    (CLONE, {"data_files": "data/*sft-00000*"}, ["train_sft 0"]),
    ({**TABLES, "README.md": "# Rows", "LICENSE.txt": "free"}, {}, ["a", "b"]),
    ({**TABLES, "dataset_infos.json": "{}"}, {"split": "test"}, ["t"]),
    ({"README.md": OPTIONS, "a.csv": "text;n\nx,y;1\n", "b.csv": "text\nNA\n"}, {"name": "a"}, ["x,y"]),
    ({"README.md": TYPES, "train.csv": "text\n12\n"}, {}, ["12"]),
    ({"README.md": TYPES, "train.txt": "one\ntwo\n"}, {}, ["one", "two"]),  # as on the Hub
])  # fmt: skip
def test_rows_are_those_of_the_configuration_and_the_split(make, files, keys, expected):
    found = entry(make(files), **keys)
    assert read_source(found)["text"][:] == expected
    assert [row["text"] for row in open_source(found)] == expected
    assert not {"README.md", "LICENSE", "LICENSE.txt", "make.py"} & {name for name, _ in source_files(found)}


def test_slices_and_what_is_left_out(make, capsys):
    folder = make(CLONE)
    rows = read_source(entry(folder, split="train_prefs[:1]+test_prefs[1:]"))
    assert rows["text"][:] == ["train_prefs 0", "test_prefs 1"]
    read_source(entry(folder, split="train_prefs"))
    line = f"{folder}: dataset repository, configuration default, splits train_prefs, test_prefs; not read: LICENSE, "
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.parametrize(("files", "keys", "message"), [
    (CLONE, {"name": "sft", "ds_type": "json"}, "ds_type: json, but this dataset repository has parquet files"),
    (CLONE, {}, "no split 'train' in the configuration default. Available splits: train_prefs, test_prefs"),
    ({"README.md": OPTIONS, "a.csv": "a\n1\n", "b.csv": "a\n1\n"}, {}, "name: None.*pick one among .*a.*b"),
    ({"README.md": "---\nlicense: mit\n---\n", "train.parquet": "version https://git-lfs.github.com/spec/v1\n"},
     {}, "train.parquet is a pointer of Git LFS .* Run `git lfs pull`"),
])  # fmt: skip
def test_what_is_not_there(make, files, keys, message):
    found = entry(make(files), **keys)
    with pytest.raises(Exception) as caught:
        read_source(found)
    assert re.search(message, told(caught.value), re.DOTALL)
    with pytest.raises(Exception):  # noqa: B017
        next(iter(open_source(found)))


def test_the_card_determines_the_rows(make):
    before = source_fingerprint(entry(make(CLONE), name="sft"))
    assert before == source_fingerprint(entry(make(CLONE), name="sft"))
    assert before != source_fingerprint(entry(make({"README.md": CARD.replace("mit", "gpl")}), name="sft"))
