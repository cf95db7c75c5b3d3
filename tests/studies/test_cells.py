"""The list of runs, their configs, what their stamps depend on, and how many steps SFT gets for the FLOPs of EBFT."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import stored
from budget import cost_of, matched_steps
from cells import MAIN_SETTINGS, SETTINGS, TASKS, Cell, all_cells, chosen, needs
from corpus import PARTS
from job import Job, finished
from scale import SCALES
from settings import Place, cell_overrides, config_file, evaluation_overrides

from ebft import load_config

SCALE = SCALES["smollm2"]
MADE_FROM = {name: name for name in ("base", "humaneval", *(f"{task}_{part}" for task in TASKS for part in PARTS))}


def job(cell: Cell, folder: Path, **changes) -> Job:
    return replace(Job(cell, SCALE, Place(folder, "base"), folder / "results", MADE_FROM), **changes)


def test_every_cell_has_a_name_of_its_own():
    names = [cell.name for cell in all_cells((0, 1, 2))]
    assert len(names) == len(set(names))


def test_methods_by_task():
    cells = [cell for cell in all_cells((0, 1, 2)) if cell.measures == "task"]
    assert {cell.task for cell in cells if cell.method == "rlvr"} == {"functions"}, "others have no verifier"
    structured = [cell.name for cell in cells if cell.method == "structured"]
    assert structured == [f"translation-base-structured-seed{seed}" for seed in (0, 1, 2)]
    seeds = Counter((cell.task, cell.method, cell.setting) for cell in cells if cell.start == "base")
    for task in TASKS:
        assert seeds[task, "sft", ""] == 3 and seeds[task, "none", ""] == seeds[task, "sft_flops", ""] == 1
        assert all(seeds[task, "ebft", name] == (3 if name in MAIN_SETTINGS[task] else 1) for name in SETTINGS)


def test_every_cell_has_a_valid_config(tmp_path):
    for cell in all_cells((0,)):
        if cell.method == "none":
            continue
        config = load_config(config_file(cell.method), cell_overrides(Place(tmp_path, "base"), SCALE, cell, 7, 2e-5))
        assert (config.seed, config.base_model, config.max_steps, config.learning_rate) == (cell.seed, "base", 7, 2e-5)
        assert config.method.samples_blocks == (cell.method == "ebft") and config.auto_resume_from_checkpoints
        assert (config.lora_model_dir is not None) == (cell.start == "warm")


@pytest.mark.parametrize("method", ["sft", "ebft", "rlvr", "structured"])
def test_a_step_has_sixteen_documents(method, tmp_path):
    config = load_config(config_file(method))
    found = cost_of({}, config)
    steps = SCALE.structured_steps if method == "structured" else SCALE.steps
    assert found["documents"] == 16 * config.max_steps == 16 * steps <= SCALE.rows["train"]


def test_long_documents_have_one_rollout_as_long_as_there_is_room(tmp_path):
    for task, length in (("functions", 128), ("raw", 128), ("translation", 64)):
        overrides = evaluation_overrides(Place(tmp_path, "base"), SCALE, task, "long")
        config = load_config(config_file("evaluation"), overrides)
        assert config.ebft.generate_max_len == length and config.ebft.stride > config.sequence_len
        assert (config.ebft.context_length == 64) == (task == "raw")


def test_cells_are_chosen_by_patterns_in_their_order():
    cells = all_cells((0, 1, 2))
    names = [cell.name for cell in chosen(cells, ["raw-base-sft-*", "raw-base-none*"], [])]
    assert names == ["raw-base-sft-seed0", "raw-base-sft-seed1", "raw-base-sft-seed2", "raw-base-none-seed0"]
    assert {cell.task for cell in chosen(cells, [], ["raw"])} == {"raw"}
    assert chosen(cells, [], []) == cells
    with pytest.raises(ValueError, match="matches no cell"):
        chosen(cells, ["raw-base-sff*"], [])


def test_a_cell_waits_for_those_whose_model_or_flops_it_takes():
    by_name = {cell.name: cell for cell in all_cells((0, 1))}
    waits = lambda name, other: needs(by_name[name], by_name[other])
    assert waits("functions-base-sft-seed0-humaneval", "functions-base-sft-seed0")
    assert not waits("functions-base-sft-seed0-humaneval", "functions-base-rlvr-seed0")
    assert not waits("functions-base-sft-seed0", "functions-base-sft-seed0-humaneval")
    assert waits("raw-base-sft_flops-seed0", "raw-base-sft-seed0")
    assert waits("raw-base-sft_flops-seed0", f"raw-base-ebft-{MAIN_SETTINGS['raw'][0]}-seed0")
    assert not waits("raw-base-sft_flops-seed0", "raw-base-sft-seed1")


def test_a_stamp_does_not_depend_on_places(tmp_path):
    for cell in all_cells((0,))[:6]:
        here, there = job(cell, tmp_path / "a"), job(cell, tmp_path / "b")
        assert here.stamp == replace(there, place=Place(tmp_path, "/other/model")).stamp


def test_a_stamp_depends_on_data_model_and_settings(tmp_path):
    cell = Cell("functions", "base", "sft")
    stamp = job(cell, tmp_path).stamp
    changed = lambda name: {**MADE_FROM, name: "other"}
    for name in ("base", "functions_train", "functions_test", "functions_long"):
        assert job(cell, tmp_path, made_from=changed(name)).stamp != stamp, name
    for name in ("functions_warm", "raw_test", "humaneval"):
        assert job(cell, tmp_path, made_from=changed(name)).stamp == stamp, name
    assert job(cell, tmp_path, scale=replace(SCALE, steps=3)).stamp != stamp
    assert job(replace(cell, seed=1), tmp_path).stamp != stamp
    stored.write_json(tmp_path / "results" / "sweep.json", {"chosen": {"functions-sft": 7e-5}})
    assert job(cell, tmp_path).stamp != stamp
    warm = replace(cell, start="warm")
    assert job(warm, tmp_path, made_from=changed("functions_warm")).stamp != job(warm, tmp_path).stamp


def test_a_stored_result_counts_where_its_stamp_is_the_jobs(tmp_path):
    one = job(Cell("raw", "base", "sft"), tmp_path)
    assert finished(one) is None
    result = {"cell": {"name": one.cell.name}, "stamp": one.stamp, "per_document": {}}
    path = stored.write_cell(one.folder, result)
    assert finished(one) == result
    assert finished(replace(one, cell=replace(one.cell, seed=1))) is None
    path.write_text("{")  # as a machine that went down may leave it
    assert finished(one) is None


def test_matched_steps_come_from_stored_cells(tmp_path):
    one = job(Cell("raw", "base", "sft_flops"), tmp_path)
    with pytest.raises(ValueError, match="run these first"):
        _ = one.steps
    for name, flops in (("raw-base-sft-seed0", 100.0), (f"raw-base-ebft-{MAIN_SETTINGS['raw'][0]}-seed0", 450.0)):
        result = {"cell": {"name": name}, "cost": {"flops": flops, "steps": 10}, "per_document": {}}
        stored.write_cell(one.folder, result)
    assert one.steps == 45
    assert one.steps == matched_steps([{"flops": 100.0, "steps": 10}], [{"flops": 450.0, "steps": 10}])


def test_matched_steps_need_flops_of_both():
    with pytest.raises(ValueError, match="budget/flops"):
        matched_steps([{"flops": None, "steps": 10}], [{"flops": 5.0, "steps": 10}])
