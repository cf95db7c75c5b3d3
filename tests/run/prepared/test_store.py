"""Folders of prepared rows: equal to rows that are loaded directly, complete or absent, made again if damaged."""

import os

import pytest
from datasets import Dataset

from ebft.errors import DataError
from ebft.run import prepared_rows
from ebft.run.prepared_rows import RECORD, prepare_rows


@pytest.fixture
def base(tmp_path):
    return tmp_path / "prepared"


@pytest.fixture
def prepare(tokenizer, base):
    return lambda config: prepare_rows(config, tokenizer, base)


def folders(base):
    return sorted(path.name for path in base.iterdir() if path.is_dir())


HELD_OUT = [("sft", "val_set_size"), ("structured", "val_set_size"), ("packed", "test_datasets"), ("grpo", None)]


@pytest.mark.parametrize(("method", "held_out"), HELD_OUT)
def test_stored_rows_are_those_that_are_loaded(make, tokenizer, base, prepare, method, held_out):
    keys = {} if held_out == "val_set_size" else {"val_set_size": 0}
    if held_out == "test_datasets":
        keys["test_datasets"] = [entry.model_dump() for entry in make(method).datasets]
    config = make(method, **keys)
    direct = config.method.load_rows(config, tokenizer)
    prepare(config)
    stored = prepare(config)
    assert not stored.is_new and stored.folder.parent == base
    assert stored.rows.reports == direct.reports
    for loaded, read in zip(direct[:2], stored.rows[:2]):
        assert (loaded is None) == (read is None) == (loaded is direct.evaluation and held_out is None)
        if loaded is not None:
            assert read.features == loaded.features and read[:] == loaded[:] and len(read)
    arranged, read = (config.method.arrange(config, rows.train) for rows in (direct, stored.rows))
    assert [read[index] for index in range(len(read))] == [arranged[index] for index in range(len(arranged))]
    assert ("documents" in read[0]) == (method == "packed")


def test_a_changed_setting_makes_new_rows_and_keeps_the_old_ones(make, base, prepare, monkeypatch):
    first = prepare(make())
    second = prepare(make(sequence_len=20))
    assert second.is_new and folders(base) == sorted([first.folder.name, second.folder.name])
    assert max(map(len, second.rows.train["input_ids"])) <= 20 < max(map(len, first.rows.train["input_ids"]))
    with_secret = prepare(make(chat_template_kwargs={"password": "hunter2"}))
    assert with_secret.is_new and "hunter2" not in (with_secret.folder / RECORD).read_text()
    monkeypatch.setattr(prepared_rows, "locked", None)  # not needed to read, so that a folder can be read-only
    assert not prepare(make()).is_new


def test_a_killed_process_leaves_nothing_that_is_used(make, base, prepare, monkeypatch):
    save, config = Dataset.save_to_disk, make()

    def save_and_die(*arguments, **options):
        save(*arguments, **options)
        os._exit(9)

    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "save_to_disk", save_and_die)
        process = os.fork()
        if process == 0:
            try:
                prepare(config)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    (left,) = folders(base)
    assert left.startswith(".") and left.endswith(".partial")
    prepared = prepare(config)
    assert prepared.is_new and folders(base) == [prepared.folder.name]


def test_a_file_that_changes_while_it_is_read_is_an_error(make, base, prepare, rows_file, monkeypatch):
    config = make()
    load = type(config.method).load_rows

    def edited_afterwards(self, *arguments):
        rows = load(self, *arguments)
        rows_file.write_text("changed")
        return rows

    monkeypatch.setattr(type(config.method), "load_rows", edited_afterwards)
    with pytest.raises(DataError, match="was changed while it was read"):
        prepare(config)
    assert folders(base) == []
