"""The report of made-up results: verdicts follow the numbers, in both directions."""

import json
import re

import pytest
from claims import FAILS, HOLDS, OPEN, verdict
from intervals import Estimate, estimate
from report import write_report
from tables import diversity_of_starts, number

CARD = {"device": "cpu: a test", "python": "3.12", "torch": "2", "transformers": "5", "commit": "abc", "date": "today"}
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
    rows = {"functions_train": 10, "functions_eval": 5, "doctests": 1}
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
    return {
        "cell": cell,
        "metrics": metrics,
        "intervals": {name: [value - 0.1, value + 0.1] for name, value in metrics.items()},
        "seconds": {"train": 5.0, "evaluate": 5.0},
        "machine": CARD,
        "samples": 4,
        **(trained if method != "none" else {}),
    }


def report_of(results: dict, folder) -> str:
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / "small.json").write_text(json.dumps(results))
    return write_report(folder / "results", folder / "README.md").read_text()


def verdict_of(report: str, claim: str, metric: str) -> str:
    """The verdict in the claim table's row of `metric` that belongs to `claim`."""
    rows = report.split("Each trial:")[1].split(claim, 1)[1].splitlines()
    row = next(row for row in rows if f"| {metric} |" in row)
    return row.rstrip(" |").rpartition("| ")[2].strip("*")


@pytest.mark.parametrize(("gain", "expected"), [(0.2, HOLDS), (-0.2, FAILS), (0.0005, OPEN)])
def test_verdicts_follow_the_numbers(tmp_path, gain, expected):
    report = report_of(made_up(gain), tmp_path)
    assert verdict_of(report, "EBFT does better downstream than SFT on the same documents", "parses_pass@1") == expected
    assert verdict_of(report, "EBFT has a lower cross-entropy than RLVR", "ce_loss") == expected
    assert verdict_of(report, "EBFT lowers the feature-matching loss", "cfm_loss") == expected


@pytest.mark.parametrize(("gain", "expected"), [(0.2, FAILS), (-0.2, FAILS), (0.0005, HOLDS)])
def test_as_well_as_rlvr_means_close_to_it(tmp_path, gain, expected):
    assert verdict_of(report_of(made_up(gain), tmp_path), "as well downstream as RLVR", "parses_pass@1") == expected


def test_wide_intervals_decide_nothing(tmp_path):
    report = report_of(made_up(0.2, noise=1.0), tmp_path)
    assert verdict_of(report, "EBFT has a lower cross-entropy than RLVR", "ce_loss") == OPEN
    assert HOLDS not in {verdict_of(report, "as well downstream as RLVR", "parses_pass@1")}


def test_verdict_by_hand():
    assert verdict(Estimate(1.0, 0.5, 3), "higher") == HOLDS
    assert verdict(Estimate(1.0, 0.5, 3), "lower") == FAILS
    assert verdict(Estimate(-1.0, 0.5, 3), "lower") == HOLDS
    assert verdict(Estimate(0.1, 0.5, 3), "higher") == OPEN
    assert verdict(Estimate(1.0, float("nan"), 1), "higher") == OPEN
    assert verdict(Estimate(0.0, 0.0, 3), "higher") == OPEN, "no difference at all is no gain"
    assert verdict(None, "higher") == OPEN
    assert verdict(Estimate(0.0, 0.04, 3), "same") == HOLDS
    assert verdict(Estimate(0.0, 0.06, 3), "same") == OPEN
    assert verdict(Estimate(-0.2, 0.04, 3), "same") == FAILS


def test_numbers_show_two_digits_of_the_interval():
    assert number(Estimate(0.12345, 0.0234, 3)) == "0.123 ± 0.023"
    assert number(Estimate(4.0, 1.5, 3), signed=True) == "+4.0 ± 1.5"
    assert number(None) == ""


def test_report_has_machine_costs_failures_and_curves(tmp_path):
    report = report_of(made_up(0.2), tmp_path)
    for part in ("cpu: a test", "commit abc", "`python run.py`", "functions-base-rlvr-seed2", "1e+12", "FLOPs"):
        assert part in report
    picture = re.search(r"!\[Training curves\]\((.+)\)", report).group(1)
    assert (tmp_path / picture).stat().st_size > 5000


def test_without_results_there_is_no_report(tmp_path):
    with pytest.raises(ValueError, match="--size small"):
        write_report(tmp_path, tmp_path / "README.md")


def test_what_no_seed_changes_decides_nothing():
    assert verdict(estimate([0.0, 0.0, 0.0]), "same") == OPEN
    assert verdict(estimate([0.1, 0.1, 0.1]), "higher") == OPEN
    assert verdict(estimate([0.2]), "higher") == OPEN
    assert verdict(estimate([0.001, -0.002, 0.001]), "same") == HOLDS


def test_headlines_say_where_a_difference_is_decided(tmp_path):
    summary = report_of(made_up(0.2), tmp_path).split("### In short")[1].split("###")[0]
    line = next(line for line in summary.splitlines() if "SFT on the same documents, parses" in line)
    assert "+0.2" in line and "(functions, base)" in line
    summary = report_of(made_up(0.0005), tmp_path).split("### In short")[1].split("###")[0]
    assert "undecided in" in summary


@pytest.mark.parametrize(("value", "said"), [(1.3, "no sign of collapse"), (0.4, "as that sign would have it")])
def test_the_sign_of_collapse_is_judged_by_models_that_have_none(value, said):
    cell = {"cell": {"task": "raw", "start": "base", "method": "none"}, "metrics": {"diversity": value}}
    assert said in diversity_of_starts([cell])
    assert diversity_of_starts([]) is None
