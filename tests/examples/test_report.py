"""The table and the curves of the quickstart say which values can be compared."""

from rich.console import Console

from ebft.quickstart.report import METRICS, panels_of, result_table


def test_curves_of_whitened_features_are_not_said_to_be_wanted_up_or_down():
    log = [{"step": 1, "ebft/alignment": 0.8}]
    assert [metric for metric, title in panels_of(log, whitened=True) if "wanted" in title] == ["ebft/ce_loss"]
    assert all("wanted" in title for _, title in panels_of(log, whitened=False))
    assert panels_of([{"step": 1, "loss": 2.0}], whitened=True)[0] == ("loss", "cross-entropy (wanted: down)")


def test_a_whitened_loss_has_no_change_and_others_are_not_cut_at_80_columns():
    before = [{name: 1.0 for name, _ in METRICS}, {name: 1.5 for name, _ in METRICS}]
    after = [{name: 1.2 for name, _ in METRICS}, {name: 1.2 for name, _ in METRICS}]
    console = Console(width=80, record=True)
    console.print(result_table(before, after))
    lines = {line.split()[0]: line for line in console.export_text().splitlines() if line.strip()}
    assert lines["cfm_loss"].split() == ["cfm_loss", "1.25", "1.2", "-0.05", "±", "0.2", "down", "in", "noise"]
    assert lines["cfm_loss_whitened"].split() == ["cfm_loss_whitened", "1.25", "1.2"]
