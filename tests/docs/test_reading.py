"""The page for readers of the code names files that run, and its figures are those of the code."""

import json
import re
import subprocess
import sys

import pytest

from tests.docs.commands import ROOT

PAGE = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")


def test_the_names_to_read_are_in_their_files():
    rows = re.findall(r"^\| \d+ \| `(.+?)` \| .* \| (`.+`) \|$", PAGE, re.MULTILINE)
    for file, names in rows:
        source = (ROOT / "src/ebft" / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(.+?)`", names):
            assert re.search(rf"^ *(def|class) {name.rpartition('.')[2]}\b", source, re.MULTILINE), f"{file}: {name}"
    assert len(rows) == 12


@pytest.mark.slow
def test_the_page_describes_the_walk():
    command = [sys.executable, ROOT / "docs" / "walk.py"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    named = re.findall(r"^\| \d+ \| `(.+?)` \|", PAGE, re.MULTILINE)
    assert len(named) == 12 and set(named) - {"config/options.py"} <= found["strided"]["functions"].keys()
    rows = re.findall(r"^\| ([a-z\d][^|]*) \| ([\d,]+) \|(?: ([\d,]+) \|)?$", PAGE, re.MULTILINE)
    for columns, values in (("package", {name: one for name, one, other in rows if not other}),
                            ("strided", {name: one for name, one, other in rows if other}),
                            ("structured", {name: other for name, _, other in rows if other})):  # fmt: skip
        assert len(values) == (3 if columns == "package" else 5)
        for name, value in values.items():
            real = found[columns][name]
            assert abs(int(value.replace(",", "")) - real) <= max(3, 0.05 * real), f"{name}: run make docs"
