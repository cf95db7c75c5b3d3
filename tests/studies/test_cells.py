"""Runs, their configs, their stamps, their learning rates, and how many steps SFT gets for the FLOPs of EBFT."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import run
import stored
import sweep
import torch
from budget import cost_of, matched_steps
from cells import SETTINGS, TASKS, Cell, all_cells, chosen, flops_of, needs, planned
from corpus import PARTS
from job import Job, finished
from scale import SCALES
from settings import Place, cell_overrides, config_file, evaluation_overrides
from stored import SWEEP, write_cell, write_json
from sweep import SEED, best_rates, chosen_rate, objective, rate_place, sweep_cells, tried

from ebft import load_config
from ebft.scores import feature_scores

SCALE = SCALES["smollm2"]
MADE_FROM = {name: name for name in ("base", *(f"{task}_{part}" for task in TASKS for part in PARTS))}
METRICS = {"ce_loss": 4.0, "cfm_loss": 0.5, "reward_pass@1": 0.5}


def job(cell: Cell, folder: Path, **changes) -> Job:
    return replace(Job(cell, SCALE, Place(folder, "base"), folder / "results", MADE_FROM), **changes)


def test_the_plan():
    """36 runs; SFT beside EBFT with every seed; runs that take FLOPs or an adapter's start have what they need."""
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells) == 36
    seeds = Counter(cell.group for cell in cells)
    for place, count in (("functions-base", 3), ("translation-base", 3), ("raw-base", 2), ("translation-warm", 2)):
        assert seeds[f"{place}-sft"] == seeds[f"{place}-ebft-mean"] == count and seeds[f"{place}-none"] == 1
    assert {cell.task for cell in cells if cell.method == "rlvr"} == {"functions"}, "others have no verifier"
    assert {cell.setting for cell in cells if cell.setting} == set(SETTINGS)
    assert all(needed in cells for cell in cells for needed in flops_of(cell))
    assert {cell.method for cell in cells if flops_of(cell)} == {"sft_flops", "sdft"}


def test_every_cell_has_a_valid_config(tmp_path):
    place = Place(tmp_path, "base")
    for cell in all_cells():
        if cell.method == "none":
            continue
        flops = 3e9 if cell.method == "sdft" else None
        config = load_config(config_file(cell.method), cell_overrides(place, SCALE, cell, 7, 2e-5, flops))
        assert (config.seed, config.base_model, config.max_steps, config.learning_rate) == (cell.seed, "base", 7, 2e-5)
        assert config.method.samples_blocks == (cell.method == "ebft") and config.auto_resume_from_checkpoints
        assert config.budget.flops == flops
        assert (config.lora_model_dir is not None) == (cell.start == "warm")
    for task, length in {"functions": 128, "raw": 128, "translation": 64}.items():  # as long as there is room
        config = load_config(
            config_file("evaluation"), evaluation_overrides(place, SCALE, planned(task, "base", "none", 0), "long")
        )
        assert config.ebft.generate_max_len == length and config.ebft.stride > config.sequence_len
        assert (config.ebft.context_length == 64) == (task == "raw")


@pytest.mark.parametrize("method", ["sft", "sdft", "ebft", "rlvr", "structured"])
def test_a_step_has_sixteen_documents(method):
    config = load_config(config_file(method))
    steps = SCALE.structured_steps if method == "structured" else SCALE.steps
    documents = cost_of({}, config, config.max_steps)["documents"]
    assert documents == 16 * config.max_steps == 16 * steps <= SCALE.rows["train"]


def test_cells_are_chosen_by_patterns_in_their_order():
    cells = all_cells()
    names = [cell.name for cell in chosen(cells, ["raw-base-sft-*", "raw-base-none*"], [])]
    assert names == ["raw-base-sft-seed0", "raw-base-sft-seed1", "raw-base-none-seed0"]
    assert {cell.task for cell in chosen(cells, [], ["raw"])} == {"raw"} and chosen(cells, [], []) == cells
    with pytest.raises(ValueError, match="matches no cell"):
        chosen(cells, ["raw-base-sff*"], [])


def test_a_cell_waits_for_those_whose_flops_it_takes():
    matched = planned("raw", "base", "sft_flops", 0)
    for method, seed, is_waiting in (("sft", 0, True), ("ebft mean", 0, True), ("sft", 1, False), ("none", 0, False)):
        other = planned("raw", "base", method, seed)
        assert needs(matched, other) == is_waiting and not needs(other, matched), other.name


def test_a_stamp_depends_on_data_model_and_settings_and_not_on_places(tmp_path):
    for cell in all_cells()[:6]:
        here, there = job(cell, tmp_path / "a"), job(cell, tmp_path / "b")
        assert here.stamp == replace(there, place=Place(tmp_path, "/other/model")).stamp
    cell = Cell("functions", "base", "sft")
    stamp = job(cell, tmp_path).stamp
    changed = lambda name: {**MADE_FROM, name: "other"}
    for name in ("base", "functions_train", "functions_test", "functions_long"):
        assert job(cell, tmp_path, made_from=changed(name)).stamp != stamp, name
    for name in ("functions_warm", "raw_test"):
        assert job(cell, tmp_path, made_from=changed(name)).stamp == stamp, name
    assert job(cell, tmp_path, scale=replace(SCALE, steps=3)).stamp != stamp
    assert job(replace(cell, seed=1), tmp_path).stamp != stamp
    write_json(tmp_path / "results" / "sweep.json", {"chosen": {"functions-sft": 7e-5}})
    assert job(cell, tmp_path).stamp != stamp
    warm = replace(cell, start="warm")
    assert job(warm, tmp_path, made_from=changed("functions_warm")).stamp != job(warm, tmp_path).stamp


def result_of(cell, flops=1.0, stamp="s"):
    """The least that counts as the result of a cell."""
    about = {key: getattr(cell, key) for key in ("name", "group", "task", "start", "method", "seed")}
    machine = dict.fromkeys(("device", "python", "torch", "transformers", "commit"), "x") | {"threads": 1}
    cost = {"steps": 10, "documents": 160, "generated_tokens": 0, "flops": flops}
    return {"cell": about, "stamp": stamp, "machine": machine, "cost": cost,
            **{key: {} for key in ("seconds", "metrics", "measured_on", "documents", "per_document")}}  # fmt: skip


def test_a_stored_result_counts_where_its_stamp_is_the_jobs(tmp_path):
    one = job(Cell("raw", "base", "sft"), tmp_path)
    assert finished(one) is None
    result = result_of(one.cell, stamp=one.stamp)
    path = write_cell(one.folder, result)
    assert finished(one) == result
    assert finished(replace(one, cell=replace(one.cell, seed=1))) is None
    path.write_text("{")  # as a machine that went down may leave it
    assert finished(one) is None


def test_matched_steps_come_from_stored_cells_with_flops(tmp_path):
    one = job(Cell("raw", "base", "sft_flops"), tmp_path)
    with pytest.raises(ValueError, match="run these first"):
        _ = one.steps
    for cell, flops in ((Cell("raw", "base", "sft"), 100.0), (planned("raw", "base", "ebft mean", 0), 450.0)):
        write_cell(one.folder, result_of(cell, flops))
    assert one.steps == 45 == matched_steps([{"flops": 100.0, "steps": 10}], [{"flops": 450.0, "steps": 10}])
    with pytest.raises(ValueError, match="budget/flops"):
        matched_steps([{"flops": None, "steps": 10}], [{"flops": 5.0, "steps": 10}])


def test_rates_are_tried_with_a_seed_and_a_place_of_their_own():
    place, cells = Place(Path("output"), "base"), sweep_cells(SCALE)
    names = {cell.name for cell in cells}
    assert len(names) == len(cells) == 2 * len(SCALE.rates)
    assert not names & {cell.name for cell in all_cells()}
    assert {cell.seed for cell in cells} == {SEED} and SEED not in {cell.seed for cell in all_cells()}
    assert {cell.measures for cell in cells} == {"sweep"}
    assert len({place.model(cell) for cell in cells}) == len({place.lock(cell) for cell in cells}) == len(cells)


def test_the_reward_that_is_measured_is_one_minus_the_feature_matching_loss():
    """As the report says: 2 a - 2 · 0.5 d of the samples against 1 - 2 a + d."""
    assert load_config(config_file("evaluation")).ebft.diversity_coef == 0.5
    generator = torch.Generator().manual_seed(0)
    phi = torch.nn.functional.normalize(torch.randn(5, 4, 8, generator=generator), dim=-1)
    phi_ref = torch.nn.functional.normalize(torch.randn(5, 8, generator=generator), dim=-1)
    found = feature_scores(phi, phi_ref, alignment_coef=1.0, diversity_coef=0.5, pass_at=[1])
    torch.testing.assert_close(found["reward_pass@1"], 1 - found["cfm_loss"])


def test_the_best_rate_of_each_place_is_chosen_once_all_are_tried(tmp_path):
    """Each method is judged by what it trains for."""
    assert objective("sft", METRICS, 0.2) == -4.0 and objective("ebft", METRICS, 0.25) == -0.5
    best = SCALE.rates[1]
    for cell in sweep_cells(SCALE):
        if cell.method == "sft" and cell.setting == f"rate {SCALE.rates[0]:g}":
            continue
        ce_loss = 3.0 if cell.overrides[-1] == f"learning_rate={best:g}" else 4.0
        result = {"cell": {"name": cell.name}, "metrics": {**METRICS, "ce_loss": ce_loss}, "per_document": {}}
        write_cell(tmp_path / SWEEP, result)
    run.store_rates(SCALE, tmp_path)
    found = stored.read(tmp_path / "sweep.json")
    values = found["tried"]["functions-ebft-mean"][f"{best:g}"]
    assert values == {"objective": pytest.approx(0.5 - 0.2 * 3.0), "ce_loss": 3.0, "cfm_loss": 0.5}
    assert found["chosen"] == {"functions-ebft-mean": best}
    assert len(found["tried"]["functions-sft"]) == len(SCALE.rates) - 1
    assert best_rates(tried(SCALE, tmp_path), SCALE.rates) == found["chosen"]


def test_settings_of_a_family_share_its_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "BY_HAND", {})
    write_json(tmp_path / "sweep.json", {"chosen": {"raw-sft": 7e-5, "raw-ebft-mean": 2e-4}})
    mean = Cell("raw", "base", "ebft", setting="mean ce 0")
    for cell, rate in (
        (Cell("raw", "warm", "sft"), 7e-5),
        (Cell("raw", "warm", "sft_flops"), 7e-5),
        (mean, 2e-4),
        (Cell("raw", "base", "ebft", setting="paper"), None),
        (Cell("raw", "warm", "none"), None),
    ):
        assert chosen_rate(tmp_path, cell) == rate, cell
    assert chosen_rate(tmp_path / "nowhere", Cell("raw", "warm", "sft")) is None
    monkeypatch.setattr(sweep, "BY_HAND", {"raw-sft": (1e-5, "why")})
    assert chosen_rate(tmp_path, Cell("raw", "base", "sft")) == 1e-5 and rate_place(mean) == "raw-ebft-mean"
