"""The report of made-up results: verdicts follow the numbers, in both directions, whatever cells are missing."""

import re

import pytest
import report_text as text
import stored
from claims import FAILS, HOLDS, OPEN, verdict
from intervals import Estimate
from report import write_report
from scale import SCALES
from tables import number

SCALE = SCALES["smollm2"]
CARD = {"device": "cpu: a test", "python": "3.12", "torch": "2", "transformers": "5", "commit": "abc", "date": "today"}
FILES = {"functions_test": ["a.py", "b.py", "b.py", "c.py"], "humaneval": ["HumanEval/0", "HumanEval/1"]}
DOCUMENTS = {"rows": {"functions_test": 4}, "made_from": {"functions_test": "x", "humaneval": "y"}, "sources": FILES}
METRICS = {"ce_loss": 4.0, "cfm_loss": 0.3, "cfm_loss_long": 0.3, "alignment": 1.3, "substance_pass@1": 0.5}
SETTINGS = (("sft", ""), ("rlvr", ""), ("ebft", "mean"))
SHOWN = [{"input": "def f():", "output": "\n    g()\n", "greedy": "\n    greedy()\n", "sample": "\n    sampled()\n"}]


def write_results(folder, gain: float, noise: float = 0.001, seeds=(0, 1, 2)) -> None:
    """Results in which EBFT is `gain` better than the others, with seeds that differ by `noise`."""
    stored.write_json(folder / "documents.json", DOCUMENTS)
    write_cell(folder, "none", 0, METRICS)
    for seed in seeds:
        for method, setting in SETTINGS:
            better = (gain if setting == "mean" else 0.0) + noise * (seed - 1) * (1 if setting == "mean" else -1)
            lower = {name: METRICS[name] - better for name in ("ce_loss", "cfm_loss", "cfm_loss_long")}
            metrics = {**METRICS, **lower, "substance_pass@1": 0.5 + better}
            write_cell(folder, method, seed, metrics, setting)


def write_cell(folder, method: str, seed: int, metrics: dict, setting: str = "", file: str = "functions_test", **more):
    group = "-".join(part for part in ("functions", "base", method, setting) if part)
    name = f"{group}-seed{seed}" + ("-humaneval" if file == "humaneval" else "")
    cell = {"task": "functions", "start": "base", "method": method, "seed": seed, "setting": setting}
    documents = [0, 1, 3] if file == "functions_test" else [0, 1]
    parts = {name: (documents, [v - 0.1, v, v + 0.1][: len(documents)]) for name, v in metrics.items()}
    packed = {
        name: stored.packed({"document": numbers, "sum": sums, "weight": [1.0] * len(sums)})
        for name, (numbers, sums) in parts.items()
    }
    trained = {
        "learning_rate": 0.0003,
        "cost": {"steps": 2, "documents": 16, "generated_tokens": None, "flops": 1e12},
        "log": {"ebft/alignment": [[1, 1.0], [2, 1.1]]} if method == "ebft" else {},
    }
    curves = {"cfm_loss": [[8, 0.5], [16, 0.4]], "rollout_nll_base": [[0, 4.0], [1, 4.5]]}
    result = {
        "cell": {**cell, "group": group, "name": name},
        "stamp": "s",
        "metrics": metrics,
        "measured_on": dict.fromkeys(metrics, file),
        "documents": {file: DOCUMENTS["made_from"][file]},
        "seconds": {"train": 5.0, "features": 5.0},
        "machine": CARD,
        **({"rollouts": curves, "shown": SHOWN} if file == "functions_test" else {}),
        **(trained if method != "none" and file == "functions_test" else {}),
        **more,
        "per_document": packed,
    }
    stored.write_cell(folder / stored.CELLS, result)


def report_of(folder) -> str:
    return write_report(folder / "results", folder / "README.md", SCALE).read_text()


def made_up(folder, *arguments, **more) -> str:
    write_results(folder / "results", *arguments, **more)
    return report_of(folder)


def verdict_of(report: str, claim: str, metric: str) -> str:
    """The verdict in the claim table's row of `metric` that belongs to `claim`."""
    rows = report.split("Each trial:")[1].split(claim, 1)[1].splitlines()
    row = next(row for row in rows if f"| {metric} |" in row)
    return row.rstrip(" |").rpartition("| ")[2].strip("*")


@pytest.mark.parametrize(("gain", "expected"), [(0.2, HOLDS), (-0.2, FAILS), (0.0005, OPEN)])
def test_verdicts_follow_the_numbers(tmp_path, gain, expected):
    report = made_up(tmp_path, gain)
    better = "EBFT, mean, does better downstream than SFT on as many documents"
    assert verdict_of(report, better, "substance_pass@1") == expected
    assert verdict_of(report, "EBFT, mean, has a lower cross-entropy than RLVR", "ce_loss") == expected
    assert verdict_of(report, "EBFT, mean, lowers the feature-matching loss", "cfm_loss") == expected
    assert verdict_of(report, "EBFT, mean, has a lower one than SFT on long rollouts", "cfm_loss_long") == expected


@pytest.mark.parametrize(("gain", "expected"), [(0.2, HOLDS), (-0.2, FAILS), (0.0005, HOLDS)])
def test_as_well_as_rlvr_means_not_lower_by_much(tmp_path, gain, expected):
    claim = "EBFT, mean, does as well downstream as RLVR"
    assert verdict_of(made_up(tmp_path, gain), claim, "substance_pass@1") == expected


def test_wide_intervals_and_single_seeds_decide_nothing(tmp_path):
    claim = "EBFT, mean, has a lower cross-entropy than RLVR"
    assert verdict_of(made_up(tmp_path / "wide", 0.2, noise=1.0), claim, "ce_loss") == OPEN
    report = made_up(tmp_path / "one", 0.2, seeds=(0,))
    assert verdict_of(report, claim, "ce_loss") == OPEN and "¹ |" in report


@pytest.mark.slow
def test_what_is_missing_is_listed_and_hides_nothing(tmp_path):
    """One cell after the other makes a report, the first alone too."""
    results = tmp_path / "results"
    write_results(results, 0.2)
    names = sorted(path.name for path in (results / stored.CELLS).iterdir())
    kept = {name: (results / stored.CELLS / name).read_text() for name in names}
    for name in names:
        (results / stored.CELLS / name).unlink()
    for name in names:
        (results / stored.CELLS / name).write_text(kept[name])
        missing = report_of(tmp_path).split("Missing,")[1].partition("\n")[0]
        assert f"`{name.removesuffix('.json')}`" not in missing and "`raw-warm-sft-seed0`" in missing


def test_losses_up_to_the_end_token_are_beside_those_of_all_tokens(tmp_path):
    write_results(tmp_path / "results", 0.2)
    assert "up to the end" not in report_of(tmp_path)
    by_length = {
        "ended": {"4": 0.5, "8": 0.75},
        "cfm_loss": {"4": 0.3, "8": 0.2},
        "cfm_loss_to_end": {"4": 0.3, "8": 0.1},
    }
    stored.write_json(tmp_path / "results" / "after-end-functions.json", {"models": {"a-model": by_length}})
    table = report_of(tmp_path).split("(after_end.py)")[1].partition("\n\n![")[0]
    assert "| model |  | 8 tokens |" in table and "4 tokens" not in table
    assert "| `a-model` | share that ended | 0.750 |\n| `a-model` | loss, all tokens | 0.200 |" in table
    assert "| `a-model` | loss, up to the end | 0.100 |" in table


def test_humaneval_of_a_cell_of_its_own_joins_its_models_row(tmp_path):
    write_results(tmp_path / "results", 0.2)
    scores = {"humaneval_greedy": 0.25, "humaneval_pass@1": 0.125}
    write_cell(tmp_path / "results", "sft", 0, scores, file="humaneval")
    table = report_of(tmp_path).split("Full completions:")[1]
    row = next(line for line in table.splitlines() if line.startswith("| SFT, as many documents |"))
    assert "| 0.20 ± " in row and "0.500" not in row.split("|")[3], "of the two problems"


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
    assert number(about(0.5, float("nan"), 0.02)) == "0.500 ± 0.020¹", "one seed: over files alone"


def test_the_report_has_machine_costs_completions_and_pictures(tmp_path):
    report = made_up(tmp_path, 0.2)
    for part in ("cpu: a test", "commits abc", "1.00e+12", "FLOPs", "AGPL-3.0", "greedy()", "sampled()"):
        assert part in report
    for name in ("rollouts", "training"):
        picture = re.search(rf"!\[{name} of functions from base\]\((.+)\)", report).group(1)
        assert (tmp_path / picture).stat().st_size > 5000
    assert "| EBFT, mean | 0.500 | 0.400 |  |  |  |" in report, "the loss by length"


def test_a_setting_names_the_last_value_of_a_key():
    assert text.setting("mean ce 0").endswith("`temperature=1.0`, `ce_coef=0`")
    assert text.setting("paper") == "*paper* is that file itself"


def test_losses_by_length_are_compared_by_seed(tmp_path):
    """At 8 tokens both lose 0.25 more with each seed, EBFT 0.125 more than SFT; at 16 their difference has a spread."""
    results = tmp_path / "results"
    stored.write_json(results / "documents.json", DOCUMENTS)
    for seed in (0, 1, 2):
        of_sft = [[8, 0.5 + 0.25 * seed], [16, 0.3]]
        of_ebft = [[8, 0.625 + 0.25 * seed], [16, 0.24 + 0.01 * seed]]
        for method, setting, curve in (("sft", "", of_sft), ("ebft", "mean", of_ebft)):
            curves = {"cfm_loss": curve, "rollout_nll_base": [[0, 4.0], [1, 4.5]]}
            write_cell(results, method, seed, METRICS, setting, rollouts=curves)
    table = report_of(tmp_path).split("paired by seed; with an interval over seeds alone:")[1].split("![")[0]
    # Three seeds that differ by 0.01: 4.303 * 0.01 / sqrt(3) = 0.0248.
    assert "| EBFT, mean | +0.125 | -0.050 ± 0.025 |  |  |  |" in table
    assert "| SFT, as many documents |" not in table


def test_the_report_says_how_many_documents_a_metric_has(tmp_path):
    write_results(tmp_path / "results", 0.2)
    write_cell(tmp_path / "results", "sft", 0, {"humaneval_greedy": 0.25}, file="humaneval")
    report = report_of(tmp_path)
    assert "Documents: 3 (cross-entropy; CFM loss; CFM loss, long; alignment)." in report
    assert "Documents: 3 (names), 2 (HumanEval, greedy)." in report


def test_without_results_there_is_no_report(tmp_path):
    with pytest.raises(ValueError, match="Run the study first"):
        write_report(tmp_path, tmp_path / "README.md", SCALE)


def test_runs_at_other_learning_rates_count_as_missing(tmp_path):
    write_results(tmp_path / "results", 0.2)
    values = {"objective": -4.0, "ce_loss": 4.0, "cfm_loss": 0.3}
    tried = {"functions-sft": {"0.0003": values, "0.001": {**values, "objective": -3.0}}}
    found = {"tried": tried, "by_hand": {}, "steps": 40}
    stored.write_json(tmp_path / "results" / "sweep.json", {**found, "chosen": {"functions-sft": 0.001}})
    report = report_of(tmp_path)
    assert "`functions-base-sft-seed0`" in report.split("Missing,")[1].partition("\n")[0]
    assert "**-3.000 / 4.000 / 0.300**" in report and "at the edge of what was tried for functions-sft" in report


def test_headlines_say_where_a_difference_is_decided(tmp_path):
    summary = made_up(tmp_path / "one", 0.2).split("### In short")[1].split("###")[0]
    line = next(line for line in summary.splitlines() if "EBFT, mean − SFT on as many documents, names" in line)
    assert "+0.2" in line and "better (functions, base)" in line
    summary = made_up(tmp_path / "two", 0.0005).split("### In short")[1].split("###")[0]
    assert "undecided in" in summary
