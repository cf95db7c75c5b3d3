"""The public names, imported when first used."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ebft

ROOT = Path(__file__).parents[1]
# Files and folders of the package from the bottom up. A file imports from its own room and from the lines below, also
# for type checking alone; what composes a run is on the last line. `keys` are the files keys.py of all rooms.
ROOMS = (
    "durable errors launch.worker machine printed secrets slow_calls",
    "paths row_digest",
    "anchors config dashboard fetch.cache transformers_internals rewards",
    "keys fetch.catalog reward_functions",
    "data",
    "models serving",
    "features health monitor over_trainer scores",
    "prefix",
    "fetch packed preferences strided structured",
    "nemo_gym preview reward_models sft",
    "streams",
    "cli config.adapter_checks config.carried_checks config.checks config.load config.reference config.schema "
    "config.stream_checks doctor evaluation export inference launch methods prepared quickstart run",
)
LEVELS = {room: level for level, line in enumerate(ROOMS) for room in line.split()}


@pytest.mark.parametrize("name", ebft.__all__)
def test_a_public_name_is_there(name):
    assert callable(getattr(ebft, name)) and name in dir(ebft)


def test_the_public_names_are_those_that_are_imported():
    assert ebft.__all__ == list(ebft._EXPORTS)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="no attribute 'tain'. Available: load_config"):
        ebft.tain  # noqa: B018


def test_the_version_is_that_of_the_installed_package():
    assert ebft.__version__ == version("ebft")


def test_importing_the_package_is_cheap():
    code = "import sys, ebft; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def requirements() -> dict[str, list[Requirement]]:
    """The requirements of the package, under "", and of each extra, without those that consist of other extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    parsed = {extra: [Requirement(line) for line in lines] for extra, lines in groups.items()}
    return {extra: [line for line in lines if line.name != "ebft"] for extra, lines in parsed.items()}


def names_of(lines: list[Requirement]) -> set[str]:
    return {canonicalize_name(line.name) for line in lines}


def distributions_of(module: str) -> set[str]:
    """The distributions that provide a module, or its own name if none is installed."""
    return {canonicalize_name(name) for name in installed_modules().get(module, [module])}


@cache
def installed_modules() -> Mapping[str, list[str]]:
    """The distributions of each module; finding them reads the metadata of all packages."""
    return packages_distributions()


def imports_of_the_package() -> dict[str, Path]:
    """Each package that a file of ebft imports anywhere, with one such file."""
    files = sorted((ROOT / "src" / "ebft").rglob("*.py"))
    found = {name: path for path in files for name in imported(path)}
    return {name: path for name, path in found.items() if name != "ebft" and name not in sys.stdlib_module_names}


def test_every_package_that_is_imported_is_declared():
    declared = names_of([line for extra, lines in requirements().items() if extra != "dev" for line in lines])
    for module, path in imports_of_the_package().items():
        assert distributions_of(module) & declared, f"{path} imports {module}, which pyproject.toml does not declare"


def test_every_required_package_is_used():
    used = set().union(*map(distributions_of, imports_of_the_package()))
    assert names_of(requirements()[""]) - used == {"gguf", "pip"}  # used through transformers, and as a command


def test_every_requirement_has_a_lower_bound_and_is_declared_once():
    for extra, lines in requirements().items():
        assert len(lines) == len(names_of(lines)), extra
        for line in lines:
            assert any(bound.operator in (">=", "~=") for bound in line.specifier), f"{extra}: {line}"


def test_packages_of_extras_are_imported_when_they_are_used():
    required = names_of(requirements()[""])
    optional = [name for name in imports_of_the_package() if not distributions_of(name) & required]
    assert {"matplotlib", "textual", "torchao", "bitsandbytes"} <= set(optional)
    code = f"""
import importlib, pkgutil, sys, ebft
sys.modules.update(dict.fromkeys({optional}))
for found in pkgutil.walk_packages(ebft.__path__, "ebft."):
    # Imported where the package is, or never.
    named = ("ebft.tools.dashboard.tui", "ebft.tools.launch.ray_worker", "ebft.examples")
    if not found.name.startswith(named) and "__main__" not in found.name:
        importlib.import_module(found.name)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def imported(path: Path) -> set[str]:
    """The top-level names of the packages that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow
def test_strided_mode_and_plain_fine_tuning_need_no_trl():
    code = "import sys; sys.modules['trl'] = None; import ebft.run, ebft.sft.trainer, ebft.methods.strided"
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
    for path in set(package.rglob("*.py")) - {package / "__init__.py", package / "__main__.py"}:
        room = room_of(".".join(path.relative_to(package).with_suffix("").parts))
        assert not_below(room, path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    "room",
    ["data", "health", "keys", "models", "monitor", "nemo_gym", "reward_functions", "serving", "strided", "structured"],
)
def test_a_room_does_not_know_the_run_config(room):
    source = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from ebft.config{} import {}\n"
    assert not_below(room, source.format(".schema", "RunConfig")) == ["config.schema.RunConfig"]
    assert not_below(room, source.format("", "schema")) == ["config.schema"]
    assert not_below(room, source.format(".section", "Section")) == []
