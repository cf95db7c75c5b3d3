"""Learning rates: what is tried, by what it is judged, and that the study takes the best."""

import pytest
import run
import torch
from cells import Cell, all_cells
from settings import cell_overrides, config_file, evaluation_overrides
from sizes import SIZES
from stored import load_sweep, store_sweep
from sweep import SEED, best_rates, chosen_rate, objective, sweep_cells, tried

from ebft import load_config
from ebft.scores import feature_scores

SIZE = SIZES["small"]
METRICS = {"ce_loss": 4.0, "cfm_loss": 0.5, "reward_pass@1": 0.5, "parses_pass@1": 0.25, "uses_names_pass@1": 0.2}
PER_DOCUMENT = {"parses_pass@1": {"sum": [0, 1, 0, 0]}, "uses_names_pass@1": {"sum": [0, 0.4]}}  # two without names
RESULT = {"metrics": METRICS, "per_document": PER_DOCUMENT}


def test_every_method_is_tried_in_every_place_with_a_seed_of_its_own():
    cells = sweep_cells(SIZE)
    assert len({cell.name for cell in cells} | {cell.name for cell in all_cells(SIZE.seeds)}) == len(cells) + 115
    assert {cell.seed for cell in cells} == {SEED} and SEED not in SIZE.seeds
    assert len(cells) == (2 * 3 + 2 * 2) * len(SIZE.rates)


def test_each_method_is_judged_by_what_it_trains_for():
    assert objective("sft", RESULT, 0.03) == -4.0
    assert objective("ebft", RESULT, 0.03) == pytest.approx(0.5 - 0.12)
    assert objective("rlvr", RESULT, 0.03) == pytest.approx(0.25 + 0.1)


def test_the_reward_that_ebft_is_judged_by_is_the_one_it_trains_for(tmp_path):
    trained = load_config(config_file("ebft")).ebft
    measured = load_config(config_file("evaluation"), evaluation_overrides(tmp_path, SIZE, "raw", "test")).ebft
    for name in ("alignment_coef", "diversity_coef", "embed_method", "generate_max_len", "stride", "context_length"):
        assert getattr(trained, name) == getattr(measured, name)
    assert trained.temperature == 1.0, "at which models are measured"


def test_the_reward_of_ebft_is_one_minus_the_feature_matching_loss():
    """As the report says of diversity_coef 0.5: 2 a - 2 · 0.5 d of the samples against 1 - 2 a + d."""
    generator = torch.Generator().manual_seed(0)
    phi = torch.nn.functional.normalize(torch.randn(5, 4, 8, generator=generator), dim=-1)
    phi_ref = torch.nn.functional.normalize(torch.randn(5, 8, generator=generator), dim=-1)
    found = feature_scores(phi, phi_ref, alignment_coef=1.0, diversity_coef=0.5, pass_at=[1])
    torch.testing.assert_close(found["reward_pass@1"], 1 - found["cfm_loss"])


def test_the_best_rate_of_each_place_is_chosen():
    results = []
    for cell in sweep_cells(SIZE):
        best = cell.overrides[-1] == "learning_rate=0.0003"
        metrics = {**METRICS, "ce_loss": 3.0 if best else 4.0}
        results.append({**RESULT, "cell": {"name": cell.name}, "metrics": metrics})
    found = tried(SIZE, results)
    assert best_rates(found)["raw-warm-ebft"] == best_rates(found)["functions-base-sft"] == 0.0003
    assert found["raw-warm-ebft"]["0.0003"] == {"objective": 0.41, "ce_loss": 3.0, "cfm_loss": 0.5}
    assert "functions-base-rlvr" not in best_rates(found), "all rates are as good"
    assert set(found["functions-base-rlvr"]) == {f"{rate:g}" for rate in SIZE.rates}


def test_a_chosen_rate_replaces_the_configs(tmp_path):
    store_sweep(tmp_path, "small", {"chosen": {"raw-warm-sft": 7e-5}})
    for method in ("sft", "sft_flops"):
        cell = Cell("raw", "warm", method)
        rate = chosen_rate(tmp_path, SIZE, cell)
        config = load_config(config_file(method), cell_overrides(tmp_path, SIZE, cell, steps=5, rate=rate))
        assert config.learning_rate == 7e-5
    assert chosen_rate(tmp_path, SIZE, Cell("raw", "base", "sft")) is None
    assert chosen_rate(tmp_path, SIZE, Cell("raw", "warm", "none")) is None
    assert chosen_rate(tmp_path / "nowhere", SIZE, Cell("raw", "warm", "sft")) is None


def test_the_command_stores_what_was_tried_and_what_is_best(tmp_path, monkeypatch):
    measured = lambda job: {**METRICS, "reward_pass@1": 0.9 if "learning_rate=0.0001" in job.overrides else 0.5}
    done = lambda jobs: [{**RESULT, "cell": {"name": job.cell.name}, "metrics": measured(job)} for job in jobs]
    jobs = []
    monkeypatch.setattr(run, "make_starts", lambda size, output: ("made", {}))
    monkeypatch.setattr(run, "run_jobs", lambda given, workers: (jobs.extend(given), (done(given), {}))[1])
    assert run.sweep(SIZE, tmp_path / "output", tmp_path / "results", workers=2) == {}
    found = load_sweep(tmp_path / "results", "small")
    assert found["chosen"]["raw-base-ebft"] == 0.0001 and found["command"].endswith("--size small --sweep")
    assert found["tried"]["functions-warm-sft"]["0.001"]["objective"] == -4.0
    assert {job.part for job in jobs} == {"validation"}
    assert all("validation" in " ".join(evaluation_of(job)) for job in jobs)


def test_nothing_is_stored_where_a_run_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "make_starts", lambda size, output: ("made", {}))
    monkeypatch.setattr(run, "run_jobs", lambda given, workers: ([], {"raw-base-sft": "ValueError: no"}))
    assert run.sweep(SIZE, tmp_path, tmp_path / "results", workers=2) == {"raw-base-sft": "ValueError: no"}
    assert load_sweep(tmp_path / "results", "small") is None


def evaluation_of(job) -> list[str]:
    return evaluation_overrides(job.output, job.size, job.cell.task, job.part)
