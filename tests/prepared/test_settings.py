"""Every key of the schema determines rows, unless it is listed with a reason."""

import re
import warnings
from pathlib import Path

import ebft
from ebft.config.reference import option_groups
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


def test_a_key_is_excluded_by_name_or_changes_the_settings(make, rows_file):
    entry = {"path": str(rows_file), "type": "ebft_strided_structured.transform_prompts"}
    gym = [{"path": "x", "server_name": "y"}]
    with warnings.catch_warnings(action="ignore"):
        config = make("grpo", nemo_gym_datasets=gym, test_datasets=[entry], val_set_size=0)
        config = config.model_copy(update={"val_set_size": 2})
        before, same = row_settings(config), set()
        for key in KEYS:
            number = key.endswith(("pad_token", "seed", "weight"))
            value = [] if key == "datasets" else 123 if number else "another value"
            same |= {key} if row_settings(changed(config, key, value)) == before else set()
    assert same == EXCLUDED.keys() & set(KEYS)
    unset = {"fsdp_config", "gradient_checkpointing_kwargs", "lr_groups", "pretraining_dataset"}  # as a whole
    assert set(EXCLUDED) - set(KEYS) == unset and all(EXCLUDED.values())


def test_the_code_that_makes_rows_reads_no_excluded_key():
    found = (Path(ebft.__file__).parent / "data").rglob("*.py")
    files = [path for path in found if path.name not in ("stream.py", "keys.py")]  # streams, whose rows are not stored
    read = {found for path in files for found in re.findall(r"\b(?:cfg|config)\.([a-z_.]+)", path.read_text())}
    # The number of processes; the name of the template in an error message.
    assert len(files) > 20 and read & set(EXCLUDED) == {"dataset_num_proc", "chat_template"}


def test_a_key_that_a_custom_transform_mentions_is_included(make):
    config = make()
    assert "learning_rate" not in row_settings(config)
    assert row_settings(config, ["scale = cfg['learning_rate']"])["learning_rate"] == 1e-3
    assert row_settings(config, ["cfg.ebft.stride"])["ebft.stride"] == 4
    assert "dataset_num_proc" in row_settings(config, ["return f, {'batched': True}"])
    assert row_settings(make(train_on_inputs=False)) == row_settings(config)  # a default that is set


def test_seeds_are_included_where_rows_depend_on_them(make, rows_file):
    entry = {"path": str(rows_file), "type": "ebft_pretrain.transform"}
    weighted = lambda weight: {"val_set_size": 0, "datasets": [{**entry, "weight": weight}]}
    unshuffled = {"shuffle_merged_datasets": False}
    for keys, expected in (
        ({}, {"seed", "data_seed"}),
        ({"data_seed": 1}, {"seed", "data_seed"}),
        ({"data_seed": 1, "val_set_size": 0}, {"data_seed"}),
        (unshuffled, {"seed"}),
        ({**unshuffled, "val_set_size": 0, "test_datasets": [entry]}, set()),
        ({**weighted(0.5), "data_seed": 1}, {"seed", "data_seed"}),  # it selects documents of a weight
        ({**weighted(2.5), **unshuffled}, {"seed"}),
        ({**weighted(2), **unshuffled}, set()),
    ):
        assert {"seed", "data_seed"} & set(row_settings(make(**keys))) == expected, keys
