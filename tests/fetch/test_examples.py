"""The example configs are part of the package and are copied without overwriting anything."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ebft.tools.fetch import copy_examples, example_files

ROOT = Path(__file__).parents[2]


def test_every_example_config_is_copied(tmp_path):
    copies = copy_examples(tmp_path / "examples")
    places = {copy.relative_to(tmp_path / "examples") for copy in copies}
    source = ROOT / "examples"
    in_repository = {path.relative_to(source) for path in source.rglob("*") if path.suffix in (".yaml", ".py")}
    assert places == in_repository and Path("quickstart/smollm2.yaml") in places
    for place in places:
        assert (tmp_path / "examples" / place).read_bytes() == (source / place).read_bytes()


@pytest.mark.slow
def test_built_package_has_the_examples(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    for folder in ("src", "examples"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(source)], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("ebft-*.whl"))) as wheel:
        packed = {name.rpartition("/")[2] for name in wheel.namelist() if name.startswith("ebft/examples/")}
    assert packed == {path.name for path in example_files()}
