"""Results as files: small, whole, with six digits, and left out where documents have changed."""

import json

import pytest
import stored

DOCUMENTS = {"made_from": {"raw_test": "now"}, "sources": {"raw_test": ["a.py", "a.py", "b.py"]}, "rows": {}}


def write(folder, documents="now"):
    part = {"document": [0, 2], "sum": [1 / 3, 2.0], "weight": [4.0, 4.0]}
    whole = {"document": [0, 1, 2], "sum": [1.0, 2.0, 3.0], "weight": [1.0, 2.0, 3.0]}
    result = {
        "cell": {"name": "raw-base-sft-seed0"},
        "documents": {"raw_test": documents},
        "measured_on": {"names": "raw_test", "ce_loss": "raw_test"},
        "per_document": {"names": stored.packed(part), "ce_loss": stored.packed(whole)},
    }
    stored.write_json(folder / "documents.json", DOCUMENTS)
    return stored.write_cell(folder / stored.CELLS, result), {"names": part, "ce_loss": whole}


def test_a_cell_comes_back_with_the_sources_of_its_documents(tmp_path):
    path, parts = write(tmp_path)
    (cell,) = stored.load_cells(tmp_path)
    assert cell["sums"] == {"names": [0.333333, 2.0], "ce_loss": [1.0, 2.0, 3.0]}
    assert cell["weights"] == {name: part["weight"] for name, part in parts.items()}
    assert cell["files"] == {"names": ["a.py", "b.py"], "ce_loss": ["a.py", "a.py", "b.py"]}
    assert json.loads(path.read_text())["per_document"]["ce_loss"]["document"] == 3
    assert all(stored.unpacked(stored.packed(part)) == part for part in parts.values())


def test_cells_of_other_documents_are_left_out(tmp_path):
    write(tmp_path, documents="earlier")
    assert stored.load_cells(tmp_path) == []


def test_numbers_have_six_digits():
    assert stored.rounded({"a": [1 / 3, {"b": 123456789.0}], "c": "x", "d": 7}) == {
        "a": [0.333333, {"b": 123457000.0}],
        "c": "x",
        "d": 7,
    }


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match="x.json cannot be read"):
        stored.read(tmp_path / "x.json")
    assert stored.read(tmp_path / "y.json") is None


def test_checkpoints_of_something_else_are_removed(tmp_path):
    folder = tmp_path / "model"
    stored.empty_unless(folder, "one")
    (folder / "checkpoint-1").mkdir()
    stored.empty_unless(folder, "one")
    assert (folder / "checkpoint-1").is_dir()
    stored.empty_unless(folder, "two")
    assert not (folder / "checkpoint-1").exists()
