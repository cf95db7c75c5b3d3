"""Keys of datasets and of streams: other spellings of the same entry."""

import warnings

import pytest

from ebft.config.keys.data import DatasetEntry
from ebft.data.transforms import PreferenceColumns
from ebft.errors import ConfigError
from ebft.run.config.schema import RunConfig
from tests.config.conftest import ENTRY, STRIDED, dataset
from tests.config.test_messages import GRPO, config


@pytest.fixture
def entry(make):
    """`entry({...}, **keys)`: the only dataset of a config."""
    return lambda values, **keys: make(**dataset(**values), **keys).datasets[0]


@pytest.mark.parametrize(("given", "key", "value"), [
    ({"field_messages": "talk"}, "field", "talk"), ({"train_on_split": "test"}, "split", "test"),
    ({"train_on_eot": "all"}, "train_on_eos", "all"),
    ({"message_field_role": "from"}, "message_property_mappings", {"role": "from"}),
    ({"type": "sharegpt"}, "type", "chat_template"), ({"type": "alpaca_chat.load_qa"}, "type", "alpaca_chat.transform"),
    ({"type": {"field_output": "a"}}, "type", "user_defined"),
])  # fmt: skip
def test_other_names(entry, given, key, value):
    found = entry(given)
    assert getattr(found, key) == value
    again = entry(found.model_dump())  # as stored in run.json
    assert again == found


@pytest.mark.parametrize("keys", [{"roles_to_train": None}, {"train_on_eos": None, "roles_to_train": None}])
def test_empty_keys_of_labels_have_one_warning(entry, keys):
    with warnings.catch_warnings(record=True, action="always") as found:
        config = entry(keys)
        stored = entry(config.model_dump())
    assert config.roles_to_train is None and stored.train_on_eos is None
    (warning,) = [str(warning.message) for warning in found]
    assert warning.endswith("To train on the last turn only, use type: ebft_strided_chat.transform_last_turn.")
    assert all(f"datasets.0.{key}" in warning for key in keys)


def test_empty_names_of_columns_and_prompts_are_unset():
    given = {"system_prompt": "", "field_system": "", "field_input": "", "system_format": "", "format": "{instruction}"}
    found = DatasetEntry(path="x", type=given)
    assert found == DatasetEntry(path="x", type={"system_format": "", "format": "{instruction}"})
    assert found.user_defined.field_input == "input" and found.user_defined.system_prompt is None


def test_a_mapping_with_columns_of_preferences_stays_the_type():
    schema = RunConfig.model_json_schema()["$defs"]["DatasetEntry"]["properties"]["type"]  # editors accept a mapping
    kinds = [choice.get("type") or choice["$ref"].rpartition("/")[2] for choice in schema["anyOf"]]
    assert kinds == ["string", "PreferenceColumns", "object"] and "type" not in schema
    for key in ("field_prompt", "field_chosen", "prompt_format", "field_label"):
        text = "{prompt}" if key == "prompt_format" else "a"
        found = DatasetEntry(path="x", type={key: text, "field_system": "s"})
        assert isinstance(found.type, PreferenceColumns) and found.user_defined is None
    assert DatasetEntry(path="x", type={"field_system": "s"}).type == "user_defined"


def test_defaults_may_be_written_out(entry):
    keys = {"roles_to_train": ["assistant"], "train_on_eos": "turn", "message_field_role": "role",
            "field_tools": "tools", "trust_remote_code": False}  # fmt: skip
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", message="datasets.type")
        for method in ({}, GRPO, STRIDED):
            entry(keys, **method)
    assert entry({"roles_to_train": [], "message_field_training": "train"}).roles_to_train == []


def test_a_chat_template_of_the_datasets(make):
    entries = [{"path": "x", "type": "chat_template", "chat_template": name} for name in ("chatml", "chatml")]
    assert make(datasets=entries).chat_template == "chatml"
    assert make(datasets=entries, chat_template="chatml").chat_template == "chatml"
    with pytest.raises(ConfigError, match=r"datasets.0.chat_template: 'chatml' differs from 'llama3' of the config"):
        make(datasets=entries, chat_template="llama3")
    with pytest.raises(ConfigError, match=r"datasets.1.chat_template: 'llama3' differs from 'chatml'"):
        make(datasets=[entries[0], {**entries[1], "chat_template": "llama3"}])


def streaming(**keys):
    return config(streaming=True, max_steps=10, **keys)


@pytest.mark.parametrize("given", ["some/data", ENTRY, [{**ENTRY, "type": "pretrain"}], [
    {**ENTRY, "split": "train", "skip": 0, "trust_remote_code": False, "name": None}]])  # fmt: skip
def test_a_pretraining_dataset_is_a_stream_of_datasets(given):
    with warnings.catch_warnings(action="error"):
        first = config(datasets=None, max_steps=10, pretraining_dataset=given)
    assert first.model_dump() == streaming().model_dump()
    assert RunConfig.from_dict(first.model_dump(exclude_defaults=True)).model_dump() == first.model_dump()


def test_the_keys_of_its_entries_are_those_of_datasets():
    entry = {"path": "json", "data_files": ["a.jsonl"], "text_column": "body", "skip": 3, "split": "test", "name": "en"}
    entry["weight"] = 0.25
    (found,) = config(datasets=None, max_steps=10, pretraining_dataset=[entry]).datasets
    assert (found.path, found.data_files, found.field, found.skip) == ("json", ["a.jsonl"], "body", 3)
    assert (found.split, found.name, found.type, found.weight) == ("test", "en", "completion", 0.25)
    assert streaming(pretrain_multipack_buffer_size=7).streaming_multipack_buffer_size == 7
    schema = RunConfig.model_json_schema()
    assert schema["required"] == ["base_model"]  # editors accept either key
    assert schema["anyOf"] == [{"required": ["datasets"]}, {"required": ["pretraining_dataset"]}]
