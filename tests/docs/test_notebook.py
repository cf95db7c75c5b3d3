"""The notebook for one GPU runs from top to bottom, here on a CPU with a tiny model."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.blocks import ROOT

NOTEBOOK = ROOT / "examples" / "colab.ipynb"


def test_the_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


@pytest.mark.slow
def test_the_notebook_runs(tiny_llama_dir, tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    position = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    names = {line.partition(" =")[0] for line in notebook.cells[position].source.split("\n")}
    assert names == {"SOURCE", "MODEL", "DOCUMENTS", "HELD_OUT", "SEQUENCE_LEN", "STEPS"}
    small = f"MODEL, DOCUMENTS, HELD_OUT, SEQUENCE_LEN, STEPS = {str(tiny_llama_dir)!r}, 5, 2, 64, 2"
    notebook.cells.insert(position + 1, nbformat.v4.new_code_cell(small))
    if (ROOT / ".git").exists():
        (measures,) = [cell for cell in notebook.cells if 'REPOSITORY = ""' in cell.source]
        measures.source = measures.source.replace('REPOSITORY = ""', f'REPOSITORY = "{ROOT}"').replace(
            "minutes 25", "plan"
        )
    # The kernel and its commands use this environment and this checkout.
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("COLUMNS", "120")
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "\n".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    expected = ("if each takes all of its minutes",) if (ROOT / ".git").exists() else ()
    expected += ("5 documents", "run.yaml is valid for strided mode", "Outcome:", "tuned", "adapter.zip")
    assert [words for words in expected if words not in printed] == [], printed
    assert "Error" not in printed and "IFrame instead" not in printed, printed
    shown = [output["data"] for output in outputs if "data" in output]
    assert any("image/png" in data for data in shown)
    (report,) = [data["text/html"] for data in shown if "iframe srcdoc" in data.get("text/html", "")]
    assert "cfm_loss" in report and "Evaluation" in report
    assert (tmp_path / "outputs" / "notebook" / "report.html").is_file()
