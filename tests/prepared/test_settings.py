"""Every key of the schema determines rows, unless it is listed with a reason."""

import re
import warnings
from pathlib import Path

import pytest

import ebft
from ebft.config.reference import option_groups
from ebft.config.schema import RunConfig
from ebft.config.section import Section
from ebft.run.prepared_rows import EXCLUDED, row_settings

KEYS = [option.key for options in option_groups().values() for option in options]


def changed(section, path, value):
    """A copy of a section in which the key at `path` has another value, unchecked."""
    name, _, rest = path.partition(".")
    if not rest:
        return section.model_copy(update={name: value})
    inner = getattr(section, name)
    if isinstance(inner, list):
        inner = [changed(inner[0], rest.partition(".")[2], value), *inner[1:]]
    elif isinstance(inner, Section):
        inner = changed(inner, rest, value)
    else:
        inner = {rest: value}
    return section.model_copy(update={name: inner})


@pytest.fixture
def config(make, rows_file):
    entry = {"path": str(rows_file), "type": "ebft_strided_structured.transform_prompts"}
    keys = {"nemo_gym_datasets": [{"path": "x", "server_name": "y"}], "test_datasets": [entry], "val_set_size": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = make("grpo", **keys)
    return config.model_copy(update={"val_set_size": 2})


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_excluded_by_name_or_changes_the_settings(config, key):
    before = row_settings(config)
    value = [] if key == "datasets" else 123 if key.endswith(("pad_token", "seed", "weight")) else "another value"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = row_settings(changed(config, key, value))
    assert (before == after) == (key in EXCLUDED)


def test_the_list_contains_no_unknown_keys_and_has_reasons():
    assert set(EXCLUDED) - set(KEYS) == {
        "fsdp_config",
        "gradient_checkpointing_kwargs",
        "lr_groups",
        "pretraining_dataset",
    }  # unset as a whole
    assert all(reason for reason in EXCLUDED.values())


def test_the_code_that_makes_rows_reads_no_excluded_key():
    found = (Path(ebft.__file__).parent / "data").rglob("*.py")
    files = [path for path in found if path.parent.name != "streaming"]  # whose rows are not stored
    read = {found for path in files for found in re.findall(r"\b(?:cfg|config)\.([a-z_.]+)", path.read_text())}
    # The number of processes; the name of the template in an error message.
    assert len(files) > 20 and read & set(EXCLUDED) == {"dataset_num_proc", "chat_template"}


def test_a_key_that_a_custom_transform_mentions_is_included(make):
    config = make()
    assert "learning_rate" not in row_settings(config)
    assert row_settings(config, ["scale = cfg['learning_rate']"])["learning_rate"] == 1e-3
    assert row_settings(config, ["cfg.ebft.stride"])["ebft.stride"] == 4
    assert "dataset_num_proc" in row_settings(config, ["return f, {'batched': True}"])


def test_seeds_are_included_where_rows_depend_on_them(make, rows_file):
    included = lambda **keys: {"seed", "data_seed"} & set(row_settings(make(**keys)))
    assert included() == {"seed", "data_seed"}
    assert included(data_seed=1) == {"seed", "data_seed"}
    assert included(data_seed=1, val_set_size=0) == {"data_seed"}
    assert included(shuffle_merged_datasets=False) == {"seed"}
    entry = {"path": str(rows_file), "type": "ebft_pretrain.transform"}
    assert included(shuffle_merged_datasets=False, val_set_size=0, test_datasets=[entry]) == set()


def test_the_seed_is_included_if_it_selects_documents_of_a_weight(make, rows_file):
    def included(weight, **keys):
        entry = {"path": str(rows_file), "type": "ebft_pretrain.transform", "weight": weight}
        return {"seed", "data_seed"} & set(row_settings(make(val_set_size=0, datasets=[entry], **keys)))

    assert included(0.5, data_seed=1) == {"seed", "data_seed"}
    assert included(2.5, shuffle_merged_datasets=False) == {"seed"}
    assert included(2, shuffle_merged_datasets=False) == set()


def test_defaults_are_settings_of_the_run(make):
    """A config that sets a key to its default prepares the same rows as one that does not set it."""
    assert row_settings(make(train_on_inputs=False)) == row_settings(make())
    assert isinstance(make(), RunConfig)
