"""Folders of prepared rows: equal to rows that are loaded directly, complete or absent, made again if damaged."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ebft.errors import DataError
from ebft.run import prepared_rows
from ebft.run.prepared_rows import RECORD, prepare_rows, read_rows
from tests.prepared.conftest import METHODS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def base(tmp_path):
    return tmp_path / "prepared"


def folders(base):
    return sorted(path.name for path in base.iterdir() if path.is_dir())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("held_out", ["val_set_size", "test_datasets", None])
def test_stored_rows_are_those_that_are_loaded(make, tokenizer, base, rows_file, method, held_out):
    if held_out == "test_datasets":
        entries = make(method).datasets
        keys = {"val_set_size": 0, "test_datasets": [entry.model_dump() for entry in entries]}
    else:
        keys = {} if held_out else {"val_set_size": 0}
    config = make(method, **keys)
    direct = config.method.load_rows(config, tokenizer)
    prepare_rows(config, tokenizer, base)
    stored = prepare_rows(config, tokenizer, base)
    assert not stored.is_new and stored.folder.parent == base
    assert stored.rows.reports == direct.reports
    for loaded, read in zip(direct[:2], stored.rows[:2]):
        assert (loaded is None) == (read is None) == (loaded is direct.evaluation and held_out is None)
        if loaded is not None:
            assert read.features == loaded.features and read[:] == loaded[:] and len(read)
    arranged = config.method.arrange(config, direct.train)
    read = config.method.arrange(config, stored.rows.train)
    assert [read[index] for index in range(len(read))] == [arranged[index] for index in range(len(arranged))]
    assert ("documents" in read[0]) == (method == "packed")


def test_a_changed_setting_makes_new_rows_and_keeps_the_old_ones(make, tokenizer, base):
    first = prepare_rows(make(), tokenizer, base)
    second = prepare_rows(make(sequence_len=20), tokenizer, base)
    assert second.is_new and folders(base) == sorted([first.folder.name, second.folder.name])
    assert max(map(len, second.rows.train["input_ids"])) <= 20 < max(map(len, first.rows.train["input_ids"]))
    assert not prepare_rows(make(), tokenizer, base).is_new


def test_a_line_names_what_differs_from_the_most_similar_rows(make, tokenizer, base, rows_file, capsys):
    differing = lambda config: (
        capsys.readouterr(),
        prepare_rows(config, tokenizer, base),
        [line.partition(" differ in ")[2] for line in capsys.readouterr().err.splitlines() if "most similar" in line],
    )[2]
    assert differing(make()) == []  # there are no others
    assert differing(make(sequence_len=20, seed=1)) == ["seed, sequence_len"]
    assert differing(make(sequence_len=20)) == ["seed"]  # of two with one difference, the first by name
    assert differing(make()) == []  # nothing is prepared
    rows_file.write_text(rows_file.read_text().replace("answer", "reply"))
    assert differing(make(train_on_inputs=True)) == ["train_on_inputs, data"]


def test_edited_data_makes_new_rows(make, tokenizer, base, rows_file):
    prepare_rows(make(), tokenizer, base)
    rows_file.write_text(rows_file.read_text().replace("answer", "reply"))
    new = prepare_rows(make(), tokenizer, base)
    assert new.is_new and any("reply" in text for text in tokenizer.batch_decode(new.rows.train["input_ids"][:]))


def test_an_edited_transform_makes_new_rows(make, tokenizer, base, own_transform):
    prepare = lambda **code: prepare_rows(
        make(datasets=[{"path": "rows.jsonl", "type": own_transform(**code)}]), tokenizer, base
    )
    assert prepare().is_new and not prepare().is_new
    assert prepare(answer="' edited'").is_new


DAMAGE = {
    "a file is missing": lambda folder: next((folder / "train").glob("*.arrow")).unlink(),
    "a file is cut": lambda folder: os.truncate(next((folder / "train").glob("*.arrow")), 100),
    "a byte is changed": lambda folder: flip(next((folder / "train").glob("*.arrow"))),
    "a split is missing": lambda folder: shutil.rmtree(folder / "eval"),
    "no record": lambda folder: (folder / RECORD).unlink(),
    "a record that is no JSON": lambda folder: (folder / RECORD).write_text("{"),
    "the record of other rows": lambda folder: change_record(folder, key="0" * 32),
    "a record without files": lambda folder: change_record(folder, rows={"train": 1, "eval": 2}),
    "an empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_record(folder, **values):
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({**record, **values}))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_are_prepared_again_with_a_line(make, tokenizer, base, capsys, damage):
    config = make()
    before = prepare_rows(config, tokenizer, base)
    expected = before.rows.train[:]
    DAMAGE[damage](before.folder)
    capsys.readouterr()
    again = prepare_rows(config, tokenizer, base)
    assert again.is_new and again.rows.train[:] == expected
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(f"Prepared rows in {before.folder} are damaged (") and line.endswith("prepared again")
    assert not prepare_rows(config, tokenizer, base).is_new


KILLED = """
import os, sys
from ebft import load_config
from ebft.models.tokenizer import load_tokenizer
from ebft.run.prepared_rows import prepare_rows
from datasets import Dataset
from pathlib import Path

config = load_config(sys.argv[1])
save = Dataset.save_to_disk

def save_and_die(self, path, *arguments, **options):
    save(self, path, *arguments, **options)
    os._exit(9)

Dataset.save_to_disk = save_and_die
prepare_rows(config, load_tokenizer(config), Path(sys.argv[2]))
"""


def write_config(config, path):
    import yaml

    path.write_text(yaml.safe_dump(config.model_dump(exclude_unset=True)))
    return path


def test_a_killed_process_leaves_nothing_that_is_used(make, tokenizer, base, tmp_path):
    config = make()
    file = write_config(config, tmp_path / "run.yaml")
    done = subprocess.run([sys.executable, "-c", KILLED, file, base], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    left = folders(base)
    assert len(left) == 1 and left[0].startswith(".") and left[0].endswith(".partial")
    prepared = prepare_rows(config, tokenizer, base)
    assert prepared.is_new and folders(base) == [prepared.folder.name]


def test_an_error_while_writing_leaves_nothing(make, tokenizer, base, monkeypatch):
    from datasets import Dataset

    def full(self, *arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Dataset, "save_to_disk", full)
    with pytest.raises(DataError, match="cannot be written to .* \\(No space left on device\\). Set dataset_prepared_"):
        prepare_rows(make(), tokenizer, base)
    assert folders(base) == []


def test_a_folder_that_cannot_be_written_is_an_error(make, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="dataset_prepared_path: cannot write to .*file"):
        prepare_rows(make(), tokenizer, tmp_path / "file" / "prepared")


def test_no_usable_rows_is_an_error_and_nothing_is_stored(make, tokenizer, base, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"input": "a", "output": ""}\n')
    datasets = [{"path": str(tmp_path / "empty.jsonl"), "type": "ebft_strided_structured.transform"}]
    with pytest.raises(DataError, match="1 document produced 0 rows; dropped 1 without a reference. No usable rows"):
        prepare_rows(make(datasets=datasets, val_set_size=0), tokenizer, base)
    assert folders(base) == []


def test_a_file_that_changes_while_it_is_read_is_an_error(make, tokenizer, base, rows_file, monkeypatch):
    config = make()
    load = type(config.method).load_rows

    def edited_afterwards(self, *arguments):
        rows = load(self, *arguments)
        rows_file.write_text("changed")
        return rows

    monkeypatch.setattr(type(config.method), "load_rows", edited_afterwards)
    with pytest.raises(DataError, match="was changed while it was read"):
        prepare_rows(config, tokenizer, base)
    assert folders(base) == []


def test_of_several_at_once_one_prepares_and_the_others_read(make, tokenizer, base, monkeypatch, capsys):
    config = make()
    calls, entered, proceed = [], threading.Event(), threading.Event()
    load = type(config.method).load_rows

    def slow(self, *arguments):
        calls.append(1)
        entered.set()
        assert proceed.wait(60)
        return load(self, *arguments)

    monkeypatch.setattr(type(config.method), "load_rows", slow)
    say = prepared_rows._say
    monkeypatch.setattr(prepared_rows, "_say", lambda *arguments, **keys: (say(*arguments, **keys), proceed.set()))
    found = []
    run = lambda: found.append(prepare_rows(config, tokenizer, base))
    first, second = threading.Thread(target=run), threading.Thread(target=run)
    first.start()
    assert entered.wait(60)
    second.start()  # its line, that it waits, lets the first one proceed
    first.join(60)
    second.join(60)
    assert len(calls) == 1 and sorted(prepared.is_new for prepared in found) == [False, True]
    assert "Waiting for another process" in capsys.readouterr().err
    assert found[0].rows.train[:] == found[1].rows.train[:]


def test_a_read_only_folder_can_be_read(make, tokenizer, base, monkeypatch):
    prepare_rows(make(), tokenizer, base)
    monkeypatch.setattr(prepared_rows, "locked", None)  # not needed to read
    assert not prepare_rows(make(), tokenizer, base).is_new


def test_nothing_is_there_before_it_is_written(base):
    assert read_rows(base / "0") is None and prepared_rows.RECORD == "prepared.json"
