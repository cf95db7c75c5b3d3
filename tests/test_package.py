"""The public names, imported when first used."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ebft

ROOT = Path(__file__).parents[1]
# Files and folders of the package from the bottom up. A file imports from its own room and from the lines above its
# line, also for type checking alone. The longest name of a room applies.
CORE = (
    "anchors machine printed rewards transformers_internals",
    "errors",
    "files scores",
    "run_files",
    "catalog",
    "config",
    "data.transforms.__init__",
    "health config.keys reward_functions",
    "data",
    "models serving",
    "features monitor prefix",
    "trainer",
    "preferences reward_models sft strided structured",
    "distillation nemo_gym",
    "methods",
    "run.config",
    "run",
)
TOOLS = (
    "tools.__init__ tools.console tools.dashboard tools.fetch tools.preview",
    "tools.cli.arguments tools.doctor tools.evaluation tools.launch",
    "tools.init tools.quickstart",
    "tools.export tools.inference",
    "tools.cli",
    "__init__ __main__",
)
ROOMS = (*CORE, *TOOLS)
LEVELS = {room: level for level, line in enumerate(ROOMS) for room in line.split()}


@pytest.mark.parametrize("name", ebft.__all__)
def test_a_public_name_is_there(name):
    assert callable(getattr(ebft, name)) and name in dir(ebft)


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


@cache
def imports_of_the_package() -> dict[str, Path]:
    """Each package that a file of ebft imports anywhere, with one such file."""
    files = sorted((ROOT / "src" / "ebft").rglob("*.py"))
    found = {name: path for path in files for name in imported(ast.parse(path.read_text(encoding="utf-8")))}
    return {name: path for name, path in found.items() if name != "ebft" and name not in sys.stdlib_module_names}


def imported(tree: ast.Module) -> set[str]:
    """The top-level names of the packages that a file imports, anywhere in it."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


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


@pytest.mark.slow  # a process that imports everything
def test_packages_of_extras_are_imported_when_they_are_used():
    required = names_of(requirements()[""])
    optional = [name for name in imports_of_the_package() if not distributions_of(name) & required]
    assert {"matplotlib", "textual", "torchao", "bitsandbytes"} <= set(optional)
    code = f"""
import importlib, pkgutil, sys, ebft
sys.modules.update(dict.fromkeys({optional}))
for found in pkgutil.walk_packages(ebft.__path__, "ebft."):
    # Imported where the package is, or never.
    named = ("ebft.tools.dashboard.t", "ebft.tools.launch.ray_worker", "ebft.examples")
    if not found.name.startswith(named) and "__main__" not in found.name:
        importlib.import_module(found.name)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_strided_mode_and_plain_fine_tuning_need_no_trl():
    code = "import sys; sys.modules['trl'] = None; import ebft.run, ebft.sft.trainer, ebft.methods.ebft"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_outside_methods_asks_which_method_it_is():
    asks = re.compile(r"config\.(rl|ebft\.mode)\b|\.method\.(name|tag) *(==|!=|in)|isinstance\(\w*\.?method")
    files = [path for path in (ROOT / "src" / "ebft").rglob("*.py") if "methods" not in path.parts]
    found = [path for path in files if asks.search(path.read_text(encoding="utf-8"))]
    assert len(files) > 100 and found == []


def room_of(module: str) -> str:
    """The room of a module. Raises KeyError if it has none."""
    parts = module.split(".")
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((name for name in names if name in LEVELS), None) or LEVELS[module]


@cache
def own_imports() -> dict[str, set[str]]:
    """The modules of the package that each module imports anywhere, also for type checking alone."""
    script = runpy.run_path(str(ROOT / "docs" / "walk.py"))
    files = {name: path.relative_to(ROOT / "src/ebft").with_suffix("") for name, path in script["modules"]().items()}
    short = {name: ".".join(path.parts) for name, path in files.items()}
    return {short[name]: {short[other] for other in others} for name, others in script["imports_of_files"]().items()}


def test_rooms_import_from_those_below_alone():
    for module, others in own_imports().items():
        room = room_of(module)
        above = [name for name in others if room_of(name) != room and LEVELS[room_of(name)] >= LEVELS[room]]
        assert above == [], module


def test_imports_have_no_circle():
    """Also those for type checking and those inside functions."""
    TopologicalSorter(own_imports()).prepare()  # raises CycleError, which names a circle
