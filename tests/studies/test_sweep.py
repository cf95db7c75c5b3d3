"""Learning rates: what is tried, by what it is judged, and that the study takes the best."""

from pathlib import Path

import pytest
import run
import stored
import sweep
import torch
from cells import Cell, all_cells
from scale import SCALES
from settings import Place, config_file
from stored import SWEEP, write_cell, write_json
from sweep import SEED, best_rates, chosen_rate, objective, rate_place, sweep_cells, tried

from ebft import load_config
from ebft.scores import feature_scores

SCALE = SCALES["smollm2"]
METRICS = {"ce_loss": 4.0, "cfm_loss": 0.5, "reward_pass@1": 0.5, "substance_pass@1": 0.25}


def test_every_method_is_tried_for_every_task_with_a_seed_of_its_own():
    cells = sweep_cells(SCALE)
    names = {cell.name for cell in cells}
    assert len(names) == len(cells) == (3 * 3 + 1) * len(SCALE.rates)
    assert not names & {cell.name for cell in all_cells(SCALE.seeds)}
    assert {cell.seed for cell in cells} == {SEED} and SEED not in SCALE.seeds
    assert {cell.measures for cell in cells} == {"sweep"}


def test_models_of_two_rates_are_trained_side_by_side():
    place, cells = Place(Path("output"), "base"), sweep_cells(SCALE)
    assert len({place.model(cell) for cell in cells}) == len({place.lock(cell) for cell in cells}) == len(cells)


def test_each_method_is_judged_by_what_it_trains_for():
    assert objective("sft", METRICS, 0.03) == -4.0
    assert objective("ebft", METRICS, 0.03) == pytest.approx(0.5 - 0.12)
    assert objective("rlvr", METRICS, 0.03) == 0.25


def test_the_reward_that_is_measured_is_one_minus_the_feature_matching_loss():
    """As the report says: 2 a - 2 · 0.5 d of the samples against 1 - 2 a + d."""
    assert load_config(config_file("evaluation")).ebft.diversity_coef == 0.5
    generator = torch.Generator().manual_seed(0)
    phi = torch.nn.functional.normalize(torch.randn(5, 4, 8, generator=generator), dim=-1)
    phi_ref = torch.nn.functional.normalize(torch.randn(5, 8, generator=generator), dim=-1)
    found = feature_scores(phi, phi_ref, alignment_coef=1.0, diversity_coef=0.5, pass_at=[1])
    torch.testing.assert_close(found["reward_pass@1"], 1 - found["cfm_loss"])


def test_the_best_rate_of_each_place_is_chosen_once_all_are_tried(tmp_path):
    for cell in sweep_cells(SCALE):
        if cell.task == "raw" and cell.method == "sft" and cell.setting == f"rate {SCALE.rates[0]:g}":
            continue
        best = cell.overrides[-1] == f"learning_rate={SCALE.rates[1]:g}"
        result = {"cell": {"name": cell.name}, "metrics": {**METRICS, "ce_loss": 3.0 if best else 4.0}}
        write_cell(tmp_path / SWEEP, {**result, "per_document": {}})
    run.store_rates(SCALE, tmp_path)
    found = stored.read(tmp_path / "sweep.json")
    best = SCALE.rates[1]
    values = found["tried"]["raw-ebft-paper"][f"{best:g}"]
    assert values == {"objective": pytest.approx(0.5 - 0.03 * 3.0), "ce_loss": 3.0, "cfm_loss": 0.5}
    assert found["chosen"]["raw-ebft-paper"] == found["chosen"]["functions-sft"] == best
    assert len(found["tried"]["raw-sft"]) == len(SCALE.rates) - 1 and "raw-sft" not in found["chosen"]
    assert best_rates(tried(SCALE, tmp_path), SCALE.rates) == found["chosen"]


def test_settings_of_a_family_share_its_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "BY_HAND", {})
    write_json(tmp_path / "sweep.json", {"chosen": {"raw-sft": 7e-5, "raw-ebft-mean": 2e-4}})
    for method in ("sft", "sft_flops"):
        assert chosen_rate(tmp_path, Cell("raw", "warm", method)) == 7e-5
    assert chosen_rate(tmp_path, Cell("raw", "base", "ebft", setting="mean ce 0")) == 2e-4
    assert chosen_rate(tmp_path, Cell("raw", "base", "ebft", setting="paper")) is None
    assert chosen_rate(tmp_path, Cell("raw", "warm", "none")) is None
    assert chosen_rate(tmp_path / "nowhere", Cell("raw", "warm", "sft")) is None
    monkeypatch.setattr(sweep, "BY_HAND", {"raw-sft": (1e-5, "why")})
    assert chosen_rate(tmp_path, Cell("raw", "base", "sft")) == 1e-5
    assert rate_place(Cell("raw", "base", "ebft", setting="mean ce 0")) == "raw-ebft-mean"
