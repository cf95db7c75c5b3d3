"""The figures of layouts are those that the code gives."""

import runpy

from tests.docs.blocks import ROOT


def test_figures_are_fresh(tmp_path):
    script = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    script["write_figures"](tmp_path)
    for name in script["FIGURES"]:
        stored = ROOT / "docs" / "images" / name
        assert stored.read_bytes() == (tmp_path / name).read_bytes(), f"docs/images/{name} is stale: run make docs"
