"""Files that other programs read: citation, workflows, issue templates, hooks, the container file."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
EXTRAS = PROJECT["optional-dependencies"].values()
LINES = [Requirement(line) for line in [*PROJECT["dependencies"], *(line for extra in EXTRAS for line in extra)]]


def load(path: str):
    return YAML(typ="safe").load((ROOT / path).read_text(encoding="utf-8"))


def test_versions_agree():
    assert load("CITATION.cff")["version"] == PROJECT["version"]
    assert f"\n## {PROJECT['version']}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert load(".pre-commit-config.yaml")["repos"][0]["rev"] == f"v{PINNED['ruff']}"


def test_the_table_of_versions_has_those_that_are_tested():
    others = re.findall(r"^NEWEST_(\w+) := (\S+)", (ROOT / "Makefile").read_text(), re.M)
    bounds = {line.name: bound.version for line in LINES for bound in line.specifier if bound.operator == ">="}
    table = (ROOT / "docs/index.md").read_text().partition("## Versions")[2].partition("\n## ")[0]
    rows = [tuple(re.findall(r"[\w.]+", row)) for row in re.findall(r"^\| \w+ \| \d.*$", table, re.M)]
    newest = PINNED | {name.lower(): version for name, version in others}
    assert rows == [(name, bounds[name], PINNED[name], newest[name]) for name, *_ in rows] and len(rows) >= 8


def test_the_lock_has_the_requirements_of_the_package_and_public_addresses_alone():
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^/\"]+", text)) == {"https://pypi.org", "https://files.pythonhosted.org"}
    locked = next(package for package in tomllib.loads(text)["package"] if package["name"] == "ebft")["metadata"]
    found = {(line["name"], frozenset(SpecifierSet(line.get("specifier", "")))) for line in locked["requires-dist"]}
    declared = {(canonicalize_name(line.name), frozenset(line.specifier)) for line in LINES}
    assert found == declared, f"run make lock: {found ^ declared}"
