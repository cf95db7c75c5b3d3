"""The public names, imported when first used."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import ebft

ROOT = Path(__file__).parents[1]
# Files and folders of the package from the bottom up. A file imports from its own room and from the lines below, also
# for type checking alone; what composes a run is on the last line. `keys` are the files keys.py of all rooms.
ROOMS = (
    "durable errors secrets",
    "paths row_digest",
    "anchors config dashboard fetch.cache over_trainer over_transformers rewards",
    "keys fetch.catalog",
    "data",
    "models serving",
    "features health monitor scores",
    "prefix",
    "fetch sft strided structured",
    "nemo_gym preview",
    "cli config.checks config.load config.reference config.schema doctor evaluation export inference methods prepared "
    "quickstart run",
)
LEVELS = {room: level for level, line in enumerate(ROOMS) for room in line.split()}


@pytest.mark.parametrize("name", ebft.__all__)
def test_a_public_name_is_there(name):
    assert callable(getattr(ebft, name)) and name in dir(ebft)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="no attribute 'tain'. Available: load_config"):
        ebft.tain  # noqa: B018


def test_importing_the_package_is_cheap():
    code = "import sys, ebft; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {line.split(">=")[0].lower().replace("_", "-") for line in lines}
    distributions = packages_distributions()
    for path in (ROOT / "src" / "ebft").rglob("*.py"):
        for name in imported(path) - {"ebft", "vllm", "deepspeed"} - set(sys.stdlib_module_names):
            found = {distribution.lower().replace("_", "-") for distribution in distributions.get(name, [name])}
            assert found & declared, f"{path} imports {name}, which pyproject.toml does not declare"


def imported(path: Path) -> set[str]:
    """The top-level names of the packages that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def test_strided_mode_and_plain_fine_tuning_need_no_trl():
    code = "import sys; sys.modules['trl'] = None; import ebft.run, ebft.strided, ebft.sft; import ebft.methods.strided"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_outside_methods_asks_which_method_it_is():
    asks = re.compile(r"config\.(rl|ebft\.mode)\b|\.method\.(name|tag) *(==|!=|in)|isinstance\(\w*\.?method")
    files = [path for path in (ROOT / "src" / "ebft").rglob("*.py") if "methods" not in path.parts]
    found = [path for path in files if asks.search(path.read_text(encoding="utf-8"))]
    assert len(files) > 100 and found == []


def room_of(module: str) -> str:
    """The room of a module, whose name is without `ebft.`."""
    parts = module.split(".")
    if parts[1:2] == ["keys"]:
        return "keys"
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LEVELS else parts[0]


def not_below(room: str, source: str) -> list[str]:
    """The modules of the package that a source of `room` imports although they are not below it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    own = [name.removeprefix("ebft.") for name in found if name.partition(".")[0] == "ebft"]
    at_top = LEVELS[room] == len(ROOMS) - 1
    return [name for name in own if room_of(name) != room and LEVELS[room_of(name)] >= LEVELS[room] + at_top]


def test_rooms_import_from_those_below_alone():
    package = ROOT / "src" / "ebft"
    for path in set(package.rglob("*.py")) - {package / "__init__.py"}:
        room = room_of(".".join(path.relative_to(package).with_suffix("").parts))
        assert not_below(room, path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    "room", ["data", "health", "keys", "models", "monitor", "nemo_gym", "serving", "strided", "structured"]
)
def test_a_room_does_not_know_the_run_config(room):
    source = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from ebft.config{} import {}\n"
    assert not_below(room, source.format(".schema", "RunConfig")) == ["config.schema.RunConfig"]
    assert not_below(room, source.format("", "schema")) == ["config.schema"]
    assert not_below(room, source.format(".section", "Section")) == []
