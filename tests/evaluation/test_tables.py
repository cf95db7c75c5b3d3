"""The tables that `ebft evaluate` prints, from given results."""

import pytest
from rich.console import Console

from ebft.tools.evaluation.result import Evaluation, ModelResult

DIFFERENCES = {"cfm_loss": [-0.0134, -0.0107], "alignment": [-0.01, 0.03], "diversity": [-0.2, -0.05]}
DIFFERENCES |= {"cfm_loss_whitened": [-3.0, -1.0]}  # of a file of an earlier version


def evaluation(documents=8, models=2, applied=8):
    first = ModelResult("runs/base", {"cfm_loss": 0.1, "cfm_loss_whitened": 3.0, "alignment": 1.7, "diversity": 1.6})
    second = ModelResult(
        "runs/tuned", {"cfm_loss": 0.0882, "cfm_loss_whitened": 1.0, "alignment": 1.71, "diversity": 1.5},
        intervals={"cfm_loss": [0.07, 0.1]}, differences={"cfm_loss": -0.0118, "alignment": 0.01, "diversity": -0.1},
        documents=dict.fromkeys(("cfm_loss", "alignment", "diversity", "cfm_loss_whitened"), applied),
        difference_intervals=DIFFERENCES,
    )  # fmt: skip
    settings = {"documents": documents, "samples": 1, "temperature": 1.0}
    return Evaluation([first, second][:models], settings, {})


def lines(table):
    """The rows of a table by their first cell."""
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in text.split("\n") if "│" in line]
    return text, {row[0]: row[1:] for row in cells}


def test_differences_are_printed_with_their_intervals():
    text, rows = lines(evaluation().differences_table())
    assert "Differences from runs/base" in text and "* excludes 0" in text
    assert rows["cfm_loss v"] == ["-0.0118 [-0.0134, -0.0107]*"]
    assert rows["alignment ^"] == ["+0.01 [-0.01, +0.03]"]
    assert evaluation(models=1).differences_table() is None
    assert not any("whitened" in name for name in rows), "it does not compare models"
    _, rows = lines(evaluation().table())
    assert rows["cfm_loss_whitened"] == ["3", "1"] and rows["cfm_loss v"] == ["0.1", "0.0882 [0.07, 0.1]*"]
    assert rows["diversity v"] == ["1.6", "1.5*"]


@pytest.mark.parametrize("documents, applied, has_stars", [(8, 8, True), (7, 7, False), (1, 1, False), (20, 7, False)])
def test_few_documents_give_no_stars(documents, applied, has_stars):
    """Nor do few that a metric applies to."""
    found = evaluation(documents, applied=applied)
    text = lines(found.table())[0] + lines(found.differences_table())[0]
    assert ("]*" in text) == has_stars
    assert ("1 document, 1 sample at temperature 1" in text) == (documents == 1)
