"""Commands, configs and programs in README.md and docs/ are valid, and follow one recipe."""

import ast
import importlib
import inspect
import re
import subprocess
import warnings

import pytest
from ruff import find_ruff_bin

from ebft.errors import ConfigError
from ebft.run.config.schema import apply_overrides, parse_yaml
from ebft.tools.init.config import _settings_of
from ebft.tools.launch.sweep import read_sweep
from tests.docs.blocks import PAGES, ROOT, Block, blocks, blocks_of, inline_commands, shell_lines
from tests.docs.commands import check_command, check_config, commands_in

OTHER_YAML = ("NeMo Gym", "SkyPilot")  # titles of configs of other programs begin with its name
SWEEP = "Sweep"  # titles of files for `ebft train --sweep` begin with it


def name_of(item) -> str:
    return item.name if isinstance(item, Block) else str(item.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_parsed(page):
    """Of blocks and, perhaps incomplete, of the text."""
    for block in blocks_of(page):
        for line in shell_lines(block):
            for arguments in commands_in(line):
                _checked(check_command, arguments, f"{block.name}: {line}")
    for command in inline_commands(page):
        for arguments in commands_in(command):
            _checked(lambda given: check_command(given, incomplete=True), arguments, f"{page.name}: {command}")


@pytest.mark.parametrize("block", blocks("yaml"), ids=name_of)
def test_configs_are_valid(block, tmp_path):
    """Highlighted lines are those that the text says to remove: the config is valid without them only."""
    if block.title.startswith(OTHER_YAML):
        return
    if block.title.startswith(SWEEP):
        (tmp_path / "sweep.yaml").write_text(block.code)
        for combination in read_sweep(tmp_path / "sweep.yaml"):
            part: dict = {}
            apply_overrides(part, combination.overrides())
            check_config(part)
        return
    lines = block.code.split("\n")
    with warnings.catch_warnings(action="ignore"):
        if block.highlighted:
            with pytest.raises(AssertionError):
                check_config(parse_yaml(block.code))
        check_config(parse_yaml("\n".join(lines[i] for i in range(len(lines)) if i + 1 not in block.highlighted)))


@pytest.mark.parametrize("block", blocks("python"), ids=name_of)
def test_programs_compile_and_use_names_that_exist(block):
    is_part_of_function = block.text != block.code and not block.information and block.text.startswith("        ")
    source = f"def function(example):\n{block.text}" if is_part_of_function else block.code
    tree = ast.parse(source)
    compile(source, block.name, "exec")
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ebft":
            module = importlib.import_module(node.module)
            imported |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            known = inspect.signature(imported[node.func.id]).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
                unknown = {keyword.arg for keyword in node.keywords} - {None, *known}
                assert not unknown, f"{node.func.id} has no arguments {unknown}"


@pytest.mark.parametrize("page", ["README.md", "docs/strided.md"])
def test_programs_define_their_names(page):
    for block in blocks_of(ROOT / page):
        if block.language == "python":
            command = [find_ruff_bin(), "check", "--isolated", "--select=F821", "-"]
            subprocess.run(command, input=block.code, text=True, check=True)


def _checked(check, arguments, where):
    try:
        with warnings.catch_warnings(action="ignore"):
            check(arguments)
    except (AssertionError, ConfigError) as error:
        raise AssertionError(f"{where}\n{error}") from None


WITH_RECIPE = "README.md", "docs/texts.md", "docs/structured.md"
RECIPE = {"temperature": 1.0, "embed_method": "mean_pooling", "ce_coef": 0.2}


def test_every_place_has_the_recipe():
    found = {name: _settings_of(name, {}) for name in ("ebft", "ebft-structured")}
    for path in (*ROOT.glob("examples/str*.yaml"), *map(ROOT.joinpath, WITH_RECIPE)):
        found[path.name] = parse_yaml(re.search(r"(?ms)^base_model:.*?(?=```|\Z)", path.read_text())[0])
    assert {keys["learning_rate"] for keys in found.values()} == {1e-4}  # of adapters
    for name in ("tiny", "smollm2"):  # with higher rates, as they are short
        found[name] = parse_yaml((ROOT / "examples" / "quickstart" / f"{name}.yaml").read_text())
    for page in ("README.md", "docs/strided.md"):
        given = re.search(r"args = StridedEBFTConfig\((.*?)\)", (ROOT / page).read_text())[1]
        found[f"program of {page}"] = {key: parse_yaml(value) for key, value in re.findall(r"(\w+)=([^,]+)", given)}
    for place, keys in found.items():
        section = keys | keys.get("trl", {}) | keys.get("ebft", {})
        pooling = "completion_mean" if "trl" in keys else "mean_pooling"
        assert {key: section.get(key) for key in RECIPE} == RECIPE | {"embed_method": pooling}, place
        assert not section.get("use_whitening") and section.get("diversity_coef", 1) == 1, place
