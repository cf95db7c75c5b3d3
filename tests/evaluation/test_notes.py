"""Notes of an evaluation: too few documents, and documents that a model was trained on."""

import json
import shutil

import pytest

from ebft import evaluate, load_config
from ebft.run.config.schema import RunConfig
from ebft.run.reporting import description, recorded
from ebft.tools.evaluation.notes import TextIndex, row_texts
from tests.config.conftest import warned


def record_run(folder, path, **changes):
    """Write the run.json of a run that trained on the rows in a file, as `ebft train` does."""
    entry = {"path": str(path), "type": "ebft_strided_structured.transform"}
    values = {"base_model": "nowhere/model", "datasets": [entry], "rl": "ebft", "ebft": {"mode": "strided"}, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(description(RunConfig.from_dict(values))))


@pytest.fixture
def notes(write_config, models, tmp_path, unmeasured):
    """`notes(*overrides)`: the notes on the evaluation of the model in the folder `run`, without measuring it."""
    shutil.copytree(models / "adapter", tmp_path / "run")

    def of(*overrides, name="run"):
        config = load_config(write_config("strided"), list(overrides))
        found, said = warned(evaluate, config, [str(tmp_path / name)])
        assert {*found.notes} <= {*said}
        return found.notes

    return of


def test_evaluated_documents_that_were_trained_on_are_counted(notes, rows, tmp_path):
    assert notes() == []  # the model has no run.json
    [note] = notes("evaluation.documents=7")
    assert note.startswith("Only 7 documents are evaluated") and "chance" in note
    lines = (rows / "pairs.jsonl").read_text().splitlines()
    copies = tmp_path / "copies.jsonl"
    copies.write_text("\n".join([lines[2], lines[5], '{"input": "x", "output": "y", "number": 1}']))
    record_run(tmp_path / "run", copies)
    [note] = notes()
    assert "2 of the 9 evaluated documents are training documents of its run" in note and "run.json" in note
    record_run(tmp_path / "run", "", datasets=[{"path": str(copies), "type": "t", "split": "train[2:]"}])
    assert notes() == []
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run").rename(tmp_path / "checkpoint-3")  # in the folder of its run
    record_run(tmp_path, rows / "pairs.jsonl")
    assert "9 of the 9" in notes(name="checkpoint-3")[0]


def test_documents_that_the_run_held_out_were_not_trained_on(notes, rows, tmp_path):
    record_run(tmp_path / "run", rows / "pairs.jsonl", val_set_size=8, seed=3)
    assert notes("test_datasets=", "val_set_size=8", "seed=3") == []
    assert "1 of the 8 evaluated documents are" in notes("test_datasets=", "val_set_size=8", "seed=4")[0]


def test_training_documents_of_the_base_model_count(notes, rows, tmp_path):
    record_run(tmp_path / "first", rows / "pairs.jsonl")
    record_run(tmp_path / "run", rows / "texts.jsonl", base_model=str(tmp_path / "first"))
    [note] = notes()
    assert "9 of the 9" in note and str(tmp_path / "first" / "run.json") in note


def test_training_data_that_changed_since_the_run_are_a_note(notes, tmp_path):
    path, run = tmp_path / "own.jsonl", tmp_path / "run"
    path.write_text('{"input": "x", "output": "y"}')
    record_run(run, path, output_dir=str(run))
    config = json.loads((run / "run.json").read_text())["config"]
    (run / "run.json").unlink()
    with recorded(RunConfig.from_dict(config)):
        pass
    assert notes() == []
    path.write_text('{"input": "x", "output": "z"}')
    [note] = notes()
    assert "is not known" in note and f"{path} has changed since the run" in note
    path.unlink()
    assert "own.jsonl" in notes()[0] and "changed" not in notes()[0]


TEXT = "A text of several words."


@pytest.mark.parametrize(("one", "other", "is_same"), [
    ({"text": TEXT, "id": "a" * 99}, {"text": TEXT, "file": "/some/where/file.txt", "n": 3}, True),
    ({"prompt": "p", "completion": TEXT}, {"input": "p", "output": TEXT, "kind": "easy"}, True),
    ({"prompt": TEXT, "completion": "yes"}, {"prompt": TEXT, "completion": "no"}, False),
    ({"text": "yes"}, {"prompt": TEXT, "completion": "yes"}, False),  # a short line of another text
    ({"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": TEXT}]},
     {"input": "p", "output": TEXT}, True),
])  # fmt: skip
def test_rows_are_compared_by_their_texts(one, other, is_same):
    """In other columns and formats."""
    for first, second in ((one, other), (other, one)):
        assert bool(TextIndex([row_texts(first)]).same_as(row_texts(second))) is is_same


def test_a_shared_system_prompt_does_not_make_documents_the_same():
    rows = [{"system": TEXT, "prompt": f"question {number}", "completion": "yes"} for number in range(50)]
    index = TextIndex([row_texts(row) for row in rows])
    assert list(index.same_as(row_texts({**rows[7], "id": "x"}))) == [7]
    assert not index.same_as(row_texts({"system": TEXT, "prompt": "another", "completion": "yes"}))
