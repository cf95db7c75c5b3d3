"""The generated pages are those that the schema, the command line and the public names give."""

import runpy
from pathlib import Path

import pytest

from ebft.run.config.reference import option_groups

DOCS = Path(__file__).parents[2] / "docs"


PAGES = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_fresh(page):
    rendered = PAGES[page]()
    assert (DOCS / page).read_text(encoding="utf-8") == rendered, f"docs/{page} is stale: run make docs"


def test_types_bounds_and_defaults_in_words():
    options = {option.key: option for group in option_groups().values() for option in group}
    assert options["ebft.stride"][1:3] == ("int (at least 1, at most 1000000)", "8")
    assert options["ebft.feature_layers"][1:3] == ("list of float (at least 0, at most 1) (not empty)",
                                                   "[0.25, 0.5, 0.75]")  # fmt: skip
    assert options["bf16"][1:3] == ("true, false or auto", "auto")
    assert options["max_steps"][1:3] == ("int (at least 1, at most 1000000000)", "unset")
    assert options["base_model"].default == "required"
    assert options["datasets.N.split"].default == "train"
