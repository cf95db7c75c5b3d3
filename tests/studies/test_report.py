"""The report of made-up results: verdicts follow the numbers, in both directions."""

import re

import pytest
from claims import FAILS, HOLDS, OPEN, verdict
from intervals import Estimate
from report import write_report
from stored import load, store, store_sweep
from tables import diversity_of_starts, number

CARD = {"device": "cpu: a test", "python": "3.12", "torch": "2", "transformers": "5", "commit": "abc", "date": "today"}
FILES = {"functions": ["a.py", "b.py", "b.py", "c.py"]}
A_SWEEP = {"command": "run.py --sweep", "machine": CARD, "seconds": 60, "seed": 100}
METRICS = {"ce_loss": 4.0, "cfm_loss": 0.3, "alignment": 1.3, "diversity": 1.2, "parses_pass@1": 0.5}


def made_up(gain: float, noise: float = 0.001) -> dict:
    """Results in which EBFT is `gain` better than SFT and RLVR, with seeds that differ by `noise`."""
    cells = [a_cell("none", 0, METRICS)]
    for seed in range(3):
        shift = noise * (seed - 1)
        for method, setting in (("sft", ""), ("rlvr", ""), ("ebft", "centre"), ("ebft", "ce_coef 0")):
            better = gain if setting == "centre" else 0.0
            own = shift if setting == "centre" else -shift
            metrics = {
                **METRICS,
                "ce_loss": 4.0 - better + own,
                "cfm_loss": 0.3 - better + own,
                "parses_pass@1": 0.5 + better + own,
            }
            cells.append(a_cell(method, seed, metrics, setting))
    rows = {"functions_train": 10, "functions_test": 5, "doctests": 1}
    return {
        "size": "small",
        "command": "python run.py",
        "machine": {**CARD, "workers": 2},
        "seconds": 60,
        "rows": rows,
        "failed": {"functions-base-rlvr-seed2": "ValueError: no"},
        "cells": cells,
    }


def a_cell(method: str, seed: int, metrics: dict, setting: str = "") -> dict:
    group = "-".join(part for part in ("functions", "base", method, setting.replace(" ", "_")) if part)
    cell = {"task": "functions", "start": "base", "method": method, "seed": seed, "setting": setting, "group": group}
    trained = {
        "cost": {"steps": 2, "documents": 16, "generated_tokens": None, "flops": 1e12},
        "log": {"ebft/alignment": [[1, 1.0], [2, 1.1]]} if method == "ebft" else {},
    }
    parts = {name: {"document": [0, 1, 3], "sum": [value - 0.1, value, value + 0.1]} for name, value in metrics.items()}
    return {
        "cell": {**cell, "name": f"{group}-seed{seed}"},
        "metrics": metrics,
        "per_document": {name: {**part, "weight": [1.0, 1.0, 1.0]} for name, part in parts.items()},
        "rollouts": {"cfm_loss": [[1, 0.5], [2, 0.4]], "rollout_nll_base": [[0, 4.0], [1, 4.5]]},
        "seconds": {"train": 5.0, "evaluate": 5.0},
        "machine": CARD,
        "samples": 4,
        "learning_rate": 0.0003,
        **(trained if method != "none" else {}),
    }


def report_of(results: dict, folder) -> str:
    store(folder / "results", "small", results, FILES)
    return write_report(folder / "results", folder / "README.md").read_text()


def verdict_of(report: str, claim: str, metric: str) -> str:
    """The verdict in the claim table's row of `metric` that belongs to `claim`."""
    rows = report.split("Each trial:")[1].split(claim, 1)[1].splitlines()
    row = next(row for row in rows if f"| {metric} |" in row)
    return row.rstrip(" |").rpartition("| ")[2].strip("*")


@pytest.mark.parametrize(("gain", "expected"), [(0.2, HOLDS), (-0.2, FAILS), (0.0005, OPEN)])
def test_verdicts_follow_the_numbers(tmp_path, gain, expected):
    report = report_of(made_up(gain), tmp_path)
    assert verdict_of(report, "EBFT does better downstream than SFT on as many documents", "parses_pass@1") == expected
    assert verdict_of(report, "EBFT has a lower cross-entropy than RLVR", "ce_loss") == expected
    assert verdict_of(report, "EBFT lowers the feature-matching loss", "cfm_loss") == expected


@pytest.mark.parametrize(("gain", "expected"), [(0.2, HOLDS), (-0.2, FAILS), (0.0005, HOLDS)])
def test_as_well_as_rlvr_means_not_lower_by_much(tmp_path, gain, expected):
    assert verdict_of(report_of(made_up(gain), tmp_path), "as well downstream as RLVR", "parses_pass@1") == expected


def test_wide_intervals_decide_nothing(tmp_path):
    report = report_of(made_up(0.2, noise=1.0), tmp_path)
    assert verdict_of(report, "EBFT has a lower cross-entropy than RLVR", "ce_loss") == OPEN
    assert verdict_of(report, "as well downstream as RLVR", "parses_pass@1") == OPEN


def about(mean: float, seeds: float, documents: float = 0.0) -> Estimate:
    return Estimate(mean, seeds, documents, 3)


def test_verdict_by_hand():
    assert verdict(about(1.0, 0.5), "higher") == HOLDS
    assert verdict(about(1.0, 0.5), "lower") == FAILS
    assert verdict(about(-1.0, 0.5), "lower") == HOLDS
    assert verdict(about(0.1, 0.5), "higher") == OPEN
    assert verdict(about(0.1, 0.0, 0.5), "higher") == OPEN, "other documents might say something else"
    assert verdict(about(1.0, float("nan")), "higher") == OPEN
    assert verdict(about(0.1, 1e-16), "higher") == OPEN, "what only rounding changes"
    assert verdict(about(0.0, 0.0), "higher") == OPEN, "no difference at all is no gain"
    assert verdict(None, "higher") == OPEN
    assert verdict(about(0.0, 0.04), "as high") == HOLDS
    assert verdict(about(0.0, 0.06), "as high") == OPEN
    assert verdict(about(-0.2, 0.04), "as high") == FAILS
    assert verdict(about(0.0, 0.01), "as high", level=0.02) == OPEN, "rates near 0 cannot be lower by much"


def test_numbers_show_two_digits_of_the_interval():
    assert number(about(0.12345, 0.0234)) == "0.123 ± 0.023"
    assert number(about(4.0, 1.5), signed=True) == "+4.0 ± 1.5"
    assert number(None) == ""
    assert number(about(-0.1502, 0.1483)) == "-0.150 ± 0.148", "which is larger is to be seen"
    assert number(about(-0.0001, 0.02), signed=True) == "+0.000 ± 0.020"


def test_report_has_machine_costs_failures_and_curves(tmp_path):
    report = report_of(made_up(0.2), tmp_path)
    for part in ("cpu: a test", "commit abc", "`python run.py`", "functions-base-rlvr-seed2", "1.00e+12", "FLOPs"):
        assert part in report
    for title in ("Training curves", "Rollouts"):
        picture = re.search(rf"!\[{title}\]\((.+)\)", report).group(1)
        assert (tmp_path / picture).stat().st_size > 5000


def test_without_results_there_is_no_report(tmp_path):
    with pytest.raises(ValueError, match="--size small"):
        write_report(tmp_path, tmp_path / "README.md")


def test_results_are_stored_with_what_each_document_adds(tmp_path):
    results = made_up(0.2)
    store(tmp_path, "small", results, FILES)
    found = load(tmp_path, "small")
    for before, after in zip(results["cells"], found["cells"], strict=True):
        assert after["sums"]["ce_loss"] == pytest.approx(
            [*before["per_document"]["ce_loss"]["sum"][:2], 0.0, before["per_document"]["ce_loss"]["sum"][2]], rel=1e-5
        )
        assert after["weights"]["ce_loss"] == [1.0, 1.0, 0.0, 1.0] and "per_document" not in after
        assert after["files"] == FILES["functions"]
    assert load(tmp_path, "large") is None


@pytest.mark.parametrize(("key", "value"), [("weight", [1.0, 1.0, 2.0]), ("document", [0, 1, 2])])
def test_models_measured_on_other_documents_are_refused(tmp_path, key, value):
    results = made_up(0.2)
    results["cells"][3]["per_document"]["ce_loss"][key] = value
    with pytest.raises(ValueError, match="documents of the other models"):
        store(tmp_path, "small", results, FILES)


def test_files_that_do_not_belong_together_are_told(tmp_path):
    report_of(made_up(0.2), tmp_path)
    documents = tmp_path / "results" / "small-documents.json"
    documents.unlink()
    with pytest.raises(ValueError, match="not of one run"):
        write_report(tmp_path / "results", tmp_path / "README.md")
    documents.write_text("{")
    with pytest.raises(ValueError, match="small-documents.json cannot be read"):
        write_report(tmp_path / "results", tmp_path / "README.md")


def test_rates_of_a_later_sweep_are_told(tmp_path):
    results = made_up(0.2)
    for cell in results["cells"]:
        cell["learning_rate"] = 0.001
    store_sweep(tmp_path / "results", "small", {**A_SWEEP, "chosen": {"functions-base-sft": 0.001}, "tried": {}})
    assert "Chosen by" in report_of(results, tmp_path)
    store_sweep(tmp_path / "results", "small", {**A_SWEEP, "chosen": {"functions-base-sft": 0.01}, "tried": {}})
    with pytest.raises(ValueError, match="functions-base-sft-seed0 was not trained at the learning rate"):
        report_of(results, tmp_path)


@pytest.mark.parametrize(("chosen", "said"), [("0.0003", "No best rate is at the edge"), ("0.0001", "at the edge of")])
def test_learning_rates_are_shown_with_what_was_compared(tmp_path, chosen, said):
    rates = {"0.0001": 0.1, "0.0003": 0.2, "0.001": 0.05, chosen: 0.4}
    values = {rate: {"objective": value, "ce_loss": 4.0, "cfm_loss": 0.3} for rate, value in rates.items()}
    found = {"tried": {"functions-base-sft": values}, "chosen": {"functions-base-sft": float(chosen)}}
    store_sweep(tmp_path / "results", "small", {**A_SWEEP, **found})
    results = made_up(0.2)
    for cell in results["cells"]:
        cell["learning_rate"] = float(chosen)
    report = report_of(results, tmp_path)
    assert "**0.400 / 4.000 / 0.300**" in report and said in report
    assert "No sweep at this size" not in report and "No sweep" in report_of(made_up(0.2), tmp_path / "other")


def test_headlines_say_where_a_difference_is_decided(tmp_path):
    summary = report_of(made_up(0.2), tmp_path).split("### In short")[1].split("###")[0]
    line = next(line for line in summary.splitlines() if "SFT on as many documents, parses" in line)
    assert "+0.2" in line and "better (functions, base)" in line
    summary = report_of(made_up(0.0005), tmp_path).split("### In short")[1].split("###")[0]
    assert "undecided in" in summary


@pytest.mark.parametrize(
    ("values", "said"),
    [((1.3, 1.2), "no sign of collapse"), ((0.4, 0.5), "as it would have it"), ((1.3, 0.4), "in some of them")],
)
def test_the_sign_of_collapse_is_judged_by_models_that_have_none(values, said):
    cells = [
        {"cell": {"task": "raw", "start": start, "method": "none"}, "metrics": {"diversity": value}}
        for start, value in zip(("base", "warm"), values)
    ]
    assert said in diversity_of_starts(cells)
    assert diversity_of_starts([]) is None
