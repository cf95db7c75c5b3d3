"""The report of made-up results: verdicts follow the numbers, in both directions, whatever cells are missing."""

import json
import re

import curves
import pytest
import report_text as text
import stored
import tables
from cells import Cell
from claims import FAILS, HOLDS, OPEN, verdict
from intervals import Estimate
from report import by_application, without_copies, write_report
from scale import SCALES
from starts import near_copies
from tables import number

from tests.studies.test_cells import result_of

SCALE = SCALES["smollm2"]
VERSIONS = {"python": "3.12", "torch": "2", "transformers": "5", "commit": "abc"}
CARD = {**VERSIONS, "device": "cpu: a test", "threads": 1, "date": "today"}
FILES = {"functions_test": ["a.py", "b.py", "b.py", "c.py"]}
DOCUMENTS = {"rows": {"functions_test": 4}, "made_from": {"functions_test": "x"}, "sources": FILES}
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


def write_cell(folder, method: str, seed: int, metrics: dict, setting: str = "", **more):
    group = "-".join(part for part in ("functions", "base", method, setting) if part)
    name = f"{group}-seed{seed}"
    cell = {"task": "functions", "start": "base", "method": method, "seed": seed, "setting": setting}
    pack = lambda v: stored.packed({"document": [0, 1, 3], "sum": [v - 0.1, v, v + 0.1], "weight": [1.0] * 3})
    cost = {"steps": 2, "documents": 16, "generated_tokens": None, "flops": 1e12}
    log = {"ebft/alignment": [[1, 1.0], [2, 1.1]]} if method == "ebft" else {}
    curves = {"cfm_loss": [[8, 0.5], [16, 0.4]], "rollout_nll_base": [[0, 4.0], [1, 4.5]]}
    result = {
        "cell": {**cell, "group": group, "name": name},
        "stamp": "s",
        "metrics": metrics,
        "measured_on": dict.fromkeys(metrics, "functions_test"),
        "documents": DOCUMENTS["made_from"],
        "seconds": {"train": 5.0, "features": 5.0},
        "machine": CARD,
        "rollouts": curves,
        "shown": SHOWN,
        **({"learning_rate": 3e-4, "cost": cost, "log": log} if method != "none" else {}),
        **more,
        "per_document": {name: pack(v) for name, v in metrics.items()},
    }
    stored.write_cell(folder / stored.CELLS, result)


def report_of(folder, has_pictures: bool = False) -> str:
    with pytest.MonkeyPatch.context() as patch:  # pictures take most of the time
        if not has_pictures:
            patch.setattr(curves, "_pyplot", lambda: None)
        return write_report(folder / "results", folder / "README.md", SCALE).read_text()


def made_up(folder, *arguments, has_pictures: bool = False, **more) -> str:
    write_results(folder / "results", *arguments, **more)
    return report_of(folder, has_pictures)


def verdict_of(report: str, claim: str, metric: str) -> str:
    """The verdict in the claim table's row of `metric` that belongs to `claim`."""
    rows = report.split("### Claims")[1].split(claim, 1)[1].splitlines()
    row = next(row for row in rows if f"| {metric} |" in row)
    return row.rstrip(" |").rpartition("| ")[2].strip("*")


@pytest.mark.parametrize(("gain", "expected"), [(0.2, HOLDS), (-0.2, FAILS), (0.0004, OPEN)])
def test_verdicts_and_headlines_follow_the_numbers(tmp_path, gain, expected):
    report = made_up(tmp_path, gain)
    for claim, metric in (
        ("EBFT does better downstream than SFT", "substance_pass@1"),
        ("EBFT has a lower cross-entropy than SFT", "ce_loss"),
        ("EBFT lowers the feature-matching loss", "cfm_loss"),
        ("EBFT has a lower one than SFT on long rollouts", "cfm_loss_long"),
    ):
        assert verdict_of(report, claim, metric) == expected, claim
    first_screen = report.split("## How")[0]
    said = {HOLDS: "**Better than SFT:**", FAILS: "**Worse:**", OPEN: "**Undecided**"}[expected]
    line = next(line for line in first_screen.splitlines() if line.startswith(said))
    is_too_wide = re.search(r"functions \(3 seeds\): [^;]*cross-entropy", line)
    assert is_too_wide if expected == OPEN else f"functions, cross-entropy {-gain:+.1f}" in line
    assert f"is higher in {3 * (gain < 0) + (expected == OPEN)} of 3 pairs of runs" in first_screen
    assert "1.0 times the FLOPs" in first_screen
    assert f"In {int(expected == HOLDS)} of 1 places, it is better in something and worse in nothing" in first_screen
    lower, higher = f"{4 - gain:.3f} | {0.3 - gain:.3f} | {0.3 - gain:.3f}", f"{0.5 + gain:.3f} | 16 | 1.0e+12"
    assert f"| EBFT, mean | 3 | {lower} |  | {higher} |" in first_screen
    assert ("no reason to prefer it" in first_screen) == (expected != HOLDS)
    assert f"| RLVR | functions | 1.00 | {0.002 - gain:+.5f} ± 0.00000¹ | " in first_screen


def test_wide_intervals_and_single_seeds_decide_nothing(tmp_path):
    claim = "EBFT has a lower cross-entropy than SFT"
    assert verdict_of(made_up(tmp_path / "wide", 0.2, noise=1.0), claim, "ce_loss") == OPEN
    report = made_up(tmp_path / "one", 0.2, seeds=(0,))
    assert verdict_of(report, claim, "ce_loss") == OPEN and "¹ |" in report
    write_results(tmp_path / "narrow" / "results", 0.0004)
    write_cell(tmp_path / "narrow" / "results", "none", 0, {**METRICS, "ce_loss": 9.0})  # beside what SFT changes
    assert re.search(r"functions \(3 seeds\), cross-entropy -\S+ to \+", report_of(tmp_path / "narrow"))


@pytest.mark.slow
def test_what_is_missing_is_listed_and_hides_nothing(tmp_path):
    """One cell after the other makes a report, the first alone too."""
    cells = tmp_path / "results" / stored.CELLS
    write_results(tmp_path / "results", 0.2)
    kept = {path: path.read_text() for path in sorted(cells.iterdir())}
    for path in kept:
        path.unlink()
    for path, text_of_cell in kept.items():
        path.write_text(text_of_cell)
        missing = report_of(tmp_path, has_pictures=True).split("Still to come")[1].partition("\n")[0]
        assert f"`{path.stem}`" not in missing and "`raw-base-sft-seed0`" in missing


def test_the_report_has_all_parts(tmp_path):
    """Machine, costs, completions and pictures; losses up to the end, and runs at other learning rates."""
    results = tmp_path / "results"
    report = made_up(tmp_path, 0.2, has_pictures=True)
    for part in ("cpu: a test", "commits abc", "1.00e+12", "FLOPs", "AGPL-3.0", "greedy()"):
        assert part in report
    for title in ("EBFT less SFT .+", "rollouts of functions from base"):
        picture = re.search(rf"!\[{title}\]\((.+)\)", report).group(1)
        assert (tmp_path / picture).stat().st_size > 5000
    assert "| EBFT, mean | 0.500 | 0.400 |  |  |  |" in report, "the loss by length"
    assert "| EBFT, mean − SFT, as many documents | +0.000 | +0.000 |  |  |  |" in report
    for seed, more in enumerate((0.10, 0.11, 0.12)):
        rollouts = {"cfm_loss": [[8, 0.5 + more], [16, 0.3]], "rollout_nll_base": [[0, 4.0]]}
        metrics = {**METRICS, "cfm_loss_long": 0.1 + more / 100}
        write_cell(results, "ebft", seed, metrics, "mean", rollouts=rollouts)
    assert "(of the same rollouts the first 8 tokens are worse, by intervals over seeds alone)" in report_of(tmp_path)
    write_cell(results, "none", 0, {**METRICS, "cfm_loss_long": 0.05})
    assert "(the pretrained model has 0.050; of the same" in report_of(tmp_path)
    assert "up to the end" not in report
    losses = {"cfm_loss": {"4": 0.3, "8": 0.2}, "cfm_loss_to_end": {"4": 0.3, "8": 0.1}}
    by_length = {"ended": {"4": 0.5, "8": 0.75}, **losses}
    stored.write_json(results / "after-end-functions.json", {"models": {"a-model": by_length}})
    values = {"objective": -4.0, "ce_loss": 4.0, "cfm_loss": 0.3}
    tried = {"functions-sft": {"0.0003": values, "0.001": {**values, "objective": -3.0}}}
    report = report_of(tmp_path)
    table = report.split("(after_end.py)")[1].partition("\n\n![")[0]
    assert "| model |  | 8 tokens |" in table and "4 tokens" not in table
    assert "| `a-model` | share that ended | 0.750 |\n| `a-model` | loss, all tokens | 0.200 |" in table
    assert "| `a-model` | loss, up to the end | 0.100 |" in table
    by_temperature = {key: {"chrf_pass@1": 0.4, "pair_distance": 0.7} for key in ("1.0", "0.9")}
    models = {f"functions-base-{name}-seed2": by_temperature for name in ("sft", "ebft-mean")}
    stored.write_json(results / "temperatures-functions.json", {"models": models})
    assert "| `functions-base-sft-seed2` | 0.9 | 0.400 | 0.700 |" in report_of(tmp_path)
    assert "Documents: 3 (cross-entropy; CFM loss; CFM loss, long; alignment)." in report
    assert "Documents: 3 (names)." in report
    value = {"cosine": 0.8, "step_cosine": 0.4, "share_of_signal": 0.25, "cosine_with_longest": None}
    value |= {f"{name}_error": 0.1 for name in value}
    lengths = {"8": {f"unwhitened, n = {n}": value for n in (4, 8)}}
    about = {"task": "functions", "temperature": 1, "batches": 3, "documents": 2, "machine": CARD}
    about["rows"] = {"8": {"train": 20, "test": 10}}
    stored.write_json(results / "gradient-signal-functions-1.json", {**about, "lengths": lengths})
    report = report_of(tmp_path, has_pictures=True)
    shown = "0.800 ± 0.430 | 0.400 ± 0.430 | {} | 0.250 ± 0.430 | not measurable"  # t of three batches
    assert f"| 8 | unwhitened, n = 4 | {shown.format('0.40')} |" in report
    assert f"| 8 | unwhitened, n = 8 | {shown.format('0.30')} |" in report, "8 documents have more noise"
    assert "20 and 10 with 8 tokens are left" in " ".join(report.split())
    assert "3 batches of 2 documents" in " ".join(report.split())
    differences = report.split("| model − SFT, as many documents |")[1]
    row = next(line for line in differences.splitlines() if line.startswith("| pretrained model |"))
    assert "¹" not in row, "a start has the same value beside every seed"
    assert (results / "gradient-signal-functions.png").stat().st_size > 5000
    assert tables.step_cosine(value, 16) == pytest.approx(0.4), "16 documents are a step"
    assert tables.step_cosine(value, 4) == pytest.approx(0.8 / 13**0.5), "a quarter has four times the noise"
    found = {"tried": tried, "by_hand": {}, "steps": 40, "chosen": {"functions-sft": 0.001}}
    stored.write_json(results / "sweep.json", found)
    report = report_of(tmp_path)
    assert "`functions-base-sft-seed0`" in report.split("Still to come")[1].partition("\n")[0]
    assert "**-3.000 / 4.000 / 0.300**" in report and "at the edge of what was tried for functions-sft" in report
    with pytest.raises(ValueError, match="Run the study first"):
        write_report(tmp_path, tmp_path / "README.md", SCALE)


def about(mean: float, seeds: float, documents: float = 0.0) -> Estimate:
    return Estimate(mean, seeds, documents, 3)


def test_verdict_by_hand():
    for estimate, claim, expected, why in (
        (about(1.0, 0.5), "higher", HOLDS, ""),
        (about(1.0, 0.5), "lower", FAILS, ""),
        (about(-1.0, 0.5), "lower", HOLDS, ""),
        (about(0.1, 0.5), "higher", OPEN, ""),
        (about(0.1, 0.0, 0.5), "higher", OPEN, "other documents might say something else"),
        (about(1.0, float("nan")), "higher", OPEN, ""),
        (about(0.1, 1e-16), "higher", OPEN, "what only rounding changes"),
        (about(0.0, 0.0), "higher", OPEN, "no difference at all is no gain"),
        (None, "higher", OPEN, ""),
    ):
        assert verdict(estimate, claim) == expected, (estimate, claim, why)


def test_numbers_show_two_digits_of_the_interval():
    assert number(about(0.12345, 0.0234)) == "0.123 ± 0.023"
    assert number(about(4.0, 1.5), signed=True) == "+4.0 ± 1.5"
    assert number(None) == ""
    assert number(about(-0.1502, 0.1483)) == "-0.150 ± 0.148", "which is larger is to be seen"
    assert number(about(-0.0001, 0.02), signed=True) == "+0.000 ± 0.020"
    assert number(about(0.5, float("nan"), 0.02)) == "0.500 ± 0.020¹", "one seed: over files alone"
    assert text.setting("mean ce 0").endswith("`temperature=1.0`, `ce_coef=0`"), "the last value of a key"
    assert text.setting("paper") == "*paper* is that file itself"
    (cell,) = by_application([{"files": {"chrf": ["a/x", "a/y", "b/z"]}}], "chrf")
    assert cell["files"]["chrf"] == ["a", "a", "b"], "one application is one draw"


def test_a_stored_cell_comes_back_with_the_sources_of_its_documents_unless_these_changed(tmp_path):
    """With six digits, and in files that are whole."""
    files = {"raw_test": ["a.py", "a.py", "b.py"]}
    stored.write_json(tmp_path / "documents.json", {"made_from": {"raw_test": "now"}, "sources": files, "rows": {}})
    part = {"document": [0, 2], "sum": [1 / 3, 2.0], "weight": [4.0, 4.0]}
    whole = {"document": [0, 1, 2], "sum": [1.0, 2.0, 3.0], "weight": [1.0, 2.0, 3.0]}
    parts = {"names": part, "ce_loss": whole}
    result = {**result_of(Cell("raw", "base", "sft")), "measured_on": dict.fromkeys(parts, "raw_test")}
    result["per_document"] = {name: stored.packed(one) for name, one in parts.items()}
    path = stored.write_cell(tmp_path / stored.CELLS, {**result, "documents": {"raw_test": "now"}})
    (cell,) = stored.load_cells(tmp_path)
    assert cell["sums"] == {"names": [0.333333, 2.0], "ce_loss": [1.0, 2.0, 3.0]}
    assert cell["weights"] == {name: part["weight"] for name, part in parts.items()}
    assert cell["files"] == {"names": ["a.py", "b.py"], "ce_loss": ["a.py", "a.py", "b.py"]}
    assert json.loads(path.read_text())["per_document"]["ce_loss"]["document"] == 3
    assert all(stored.unpacked(stored.packed(part)) == part for part in parts.values())
    stored.write_cell(tmp_path / stored.CELLS, {**result, "documents": {"raw_test": "earlier"}})
    assert stored.load_cells(tmp_path) == []
    stored_result = json.loads(path.read_text())
    for change, said in (
        ({"cost": None}, "has no cost of its training"),
        ({"machine": {}}, "machine.device: Field required"),
        ({"cell": stored_result["cell"] | {"name": "raw-base-sft-seed1"}}, "is the result of raw-base-sft-seed1"),
        ({"per_document": {"names": {"document": 1, "sum": [1.0], "weight": [1, 1]}}}, "a number for each document"),
    ):
        path.write_text(json.dumps(stored_result | change))
        with pytest.raises(ValueError, match=f"raw-base-sft-seed0.json .*{said}"):
            stored.load_cells(tmp_path)
    (tmp_path / "documents.json").unlink()
    with pytest.raises(ValueError, match="has cells but no documents.json"):
        stored.load_cells(tmp_path)
    rounded = stored.rounded({"a": [1 / 3, {"b": 123456789.0}], "c": "x", "d": 7})
    assert rounded == {"a": [0.333333, {"b": 123457000.0}], "c": "x", "d": 7}
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match="x.json cannot be read"):
        stored.read(tmp_path / "x.json")
    assert stored.read(tmp_path / "y.json") is None


def test_near_copies_are_left_out_of_a_difference(tmp_path):
    copied, own = "c" * 30, "o" * 30
    test = [{"text": f"{copied}\n{own}\n{copied}\nshort"}, {"text": own}, {"text": f"{copied}\n{own}"}]
    assert near_copies([{"text": f"a\n  {copied}"}], test) == [0]
    cells = []
    for method, value in (("none", 4.0), ("sft", 3.0), ("ebft-mean", 3.5)):
        for seed in (0, 1):
            cell = {"task": "raw", "group": f"raw-base-{method}", "seed": seed}
            sums = [100 * value, value + seed, value + seed]
            cells.append({"cell": cell, "sums": {"ce_loss": sums}, "weights": {"ce_loss": [1.0] * 3}})
            cells[-1]["files"] = {"ce_loss": ["a", "b", "c"]}
    stored.write_json(tmp_path / "documents.json", {"near_copies": [0]})
    found = without_copies(cells, "base", tmp_path)
    assert found.startswith("1 of the test pieces") and "cross-entropy of +0.500" in " ".join(found.split())
    assert without_copies(cells[:4], "base", tmp_path) == ""


def test_checkpoints_of_something_else_are_removed(tmp_path):
    for made_from, remains in (("one", False), ("one", True), ("two", False)):
        stored.empty_unless(tmp_path / "model", made_from)
        assert (tmp_path / "model" / "checkpoint-1").is_dir() == remains
        (tmp_path / "model" / "checkpoint-1").mkdir(exist_ok=True)


def test_a_difference_between_precisions_is_marked(tmp_path):
    write_results(tmp_path / "results", 0.2)
    write_cell(tmp_path / "results", "sdft", 0, METRICS)
    report = report_of(tmp_path)
    assert "one thread each (but the warm start with 2)" in report
    assert "| self-distillation, 0.5 of the FLOPs² | " in report and "| EBFT, mean | -0.2" in report
