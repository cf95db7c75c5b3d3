"""Every key is documented, and every key has a reader."""

import re
import runpy
from pathlib import Path
from typing import get_args

import pytest

import ebft
from ebft.config.axolotl import IGNORED_KEYS
from ebft.config.validation_errors import section_of
from ebft.run.config.reference import option_groups
from ebft.run.config.schema import GROUPS, RunConfig

SOURCE = Path(ebft.__file__).parent
CHECKS = SOURCE / "run/config/combinations.py"
DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_fresh(page):
    assert (DOCS / page).read_text(encoding="utf-8") == PAGES[page](), f"docs/{page} is stale: run make docs"


def test_every_key_is_documented_in_one_sentence():
    options = [option for options in option_groups().values() for option in options]
    documented = lambda option: option.description.endswith(".") and len(option.description) > 10
    assert [option.key for option in options if not (documented(option) and option.type and option.default)] == []


def test_the_config_has_the_groups_in_the_order_in_which_they_are_shown():
    groups = list(GROUPS.values())
    assert [base for base in RunConfig.__mro__ if base in groups] == groups[::-1]


def test_no_key_is_declared_twice():
    names = [name for group in GROUPS.values() for name in group.model_fields]
    assert len(names) == len(set(names)) == len(RunConfig.model_fields)


def test_every_key_has_a_reader():
    """Files that declare keys do not count as reading them; the section trl: has one warning as a whole."""
    read = lambda paths: "\n".join(path.read_text(encoding="utf-8") for path in paths)
    declare = {path for path in SOURCE.rglob("*.py") if path.parent.name == "keys" or path.name == "trl.py"} - {CHECKS}
    code = read(path for path in SOURCE.rglob("*.py") if path not in declare)
    words = set(re.findall(r"""[."'](\w+)""", code))
    words |= {*IGNORED_KEYS}  # in a table
    words |= {f"wandb_{key}" for key in ("watch", "log_model", "mode", "entity")}  # read by their prefix
    words |= {"save_steps", "saves_per_epoch", "evals_per_epoch", "save_strategy", "eval_strategy"}  # also
    words |= {"pretraining_dataset", "pretrain_multipack_buffer_size"}  # read in the file that declares them
    assert RunConfig.model_fields.keys() - words == set()
    readers = [*(SOURCE / "data").rglob("*.py"), CHECKS.with_name("data.py"), SOURCE / "config/keys/data.py"]
    words = set(re.findall(r"(?:entry|dataset|self)\.(\w+)", read(readers)))
    words |= set(re.findall(r'"(field_\w+)"', read((SOURCE / "data").rglob("*.py"))))  # in tables
    fields = section_of(RunConfig.model_fields["datasets"].annotation).model_fields
    unread = fields.keys() - words - {"field_chosen", "field_rejected"}  # read by a table of names
    assert [name for name in unread if len(get_args(fields[name].annotation)) != 1] == []  # those accept one value
