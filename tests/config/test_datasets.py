"""Keys of datasets: two names of one key, keys without effect, and contradictions."""

import warnings

import pytest

from ebft.config.schema import RunConfig
from ebft.data.keys import DatasetEntry
from ebft.data.transforms import PreferenceColumns
from ebft.errors import ConfigError

PROMPTS = {"rl": "grpo", "trl": {"reward_funcs": ["own.func"]}}
STRIDED = {"rl": "ebft", "ebft": {"mode": "strided"}}
LABELS = [{"roles_to_train": ["user"]}, {"train_on_eos": "none"}, {"message_field_training": "t"}]


@pytest.fixture
def entry(make):
    """`entry({...}, **keys)`: the only dataset of a config."""
    return lambda values, **keys: make(
        datasets=[{"path": "x", "type": "chat_template", **values}], **keys
    ).datasets[0]  # fmt: skip


@pytest.mark.parametrize(("given", "key", "value"), [
    ({"field_messages": "talk"}, "field", "talk"),
    ({"train_on_split": "test"}, "split", "test"),
    ({"train_on_split": "test", "split": "test"}, "split", "test"),
    ({"train_on_eot": "all"}, "train_on_eos", "all"),
    ({"message_field_role": "from"}, "message_property_mappings", {"role": "from"}),
    ({"type": "sharegpt"}, "type", "chat_template"),
    ({"type": "alpaca_chat.load_qa"}, "type", "alpaca_chat.transform"),
    ({"type": {"field_output": "a"}}, "type", "user_defined"),
])  # fmt: skip
def test_other_names(entry, given, key, value):
    found = entry(given)
    assert getattr(found, key) == value
    again = entry(found.model_dump())  # as stored in run.json
    assert again == found


@pytest.mark.parametrize(("given", "message"), [
    ({"train_on_split": "test", "split": "dev"}, "split and train_on_split are two names of the same key"),
    ({"train_on_eos": "all", "train_on_eot": "none"}, "train_on_eos and train_on_eot are two names"),
    ({"message_field_role": "a", "message_property_mappings": {"role": "b"}}, "role and message_field_role"),
    ({"type": {"field_output": "a"}, "user_defined": {}}, "type is a mapping, and user_defined is also set"),
    ({"roles": {"user": ["a"], "assistant": ["b", "a"]}}, "datasets.0.roles: a is listed for more than one role"),
    ({"shards_idx": 1}, "datasets.0.shards_idx has no effect without shards"),
    ({"shards": 2, "shards_idx": 2}, "datasets.0.shards_idx: 2 must be less than shards: 2"),
    ({"trust_remote_code": True}, "trust_remote_code: datasets that consist of a Python program are not supported"),
    ({"train_on_eos": "some"}, "datasets.0.train_on_eos: invalid value 'some'; expected 'turn', 'all', 'last' or"),
    ({"roles_to_train": []}, "roles_to_train: \\[\\] trains on no turn. List roles .*message_field_training"),
    ({"conversation": "chatml"}, "datasets.0.conversation is not supported: set chat_template"),
    ({"message_field_training_detail": "x"}, "detail is not supported: use message_field_training"),
    ({"type": "completion", "roles": {"user": ["a"]}}, "roles has no effect with type: completion.*chat_template"),
    ({"type": "alpaca", "train_on_eos": "all"}, "train_on_eos has no effect with type: alpaca"),
    ({"type": "ebft_reasoning.transform_strided", "roles_to_train": ["user"]}, "roles_to_train has no effect with"),
    ({"user_defined": {"field_output": "a"}}, "user_defined has no effect with type: chat_template"),
    ({"type": "ebft_reasoning", "template_thinking_key": "t"}, "thinking_key is not supported with ebft_r"),
])  # fmt: skip
def test_contradictions(entry, given, message):
    with pytest.raises(ConfigError, match=message):
        entry(given, **PROMPTS if given.get("type") == "ebft_reasoning" else {})


@pytest.mark.parametrize("keys", [{"roles_to_train": None}, {"train_on_eos": None, "roles_to_train": None}])
def test_empty_keys_of_labels_have_one_warning(entry, keys):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        config = entry(keys)
        stored = entry(config.model_dump())
    assert config.roles_to_train is None and stored.train_on_eos is None
    (warning,) = [str(warning.message) for warning in found]
    assert warning.endswith("To train on the last turn only, use type: ebft_strided_chat.transform_last_turn.")
    assert all(f"datasets.0.{key}" in warning for key in keys)


@pytest.mark.parametrize("keys", LABELS)
@pytest.mark.filterwarnings("ignore:datasets.type")
def test_labels_have_no_effect_with_prompts_and_with_transforms_of_other_turns(entry, keys):
    match = f"datasets.0.{next(iter(keys))}: no effect with .*determines the turns"
    with pytest.warns(UserWarning, match=match):
        entry(keys, **PROMPTS)
    for method in ({}, STRIDED):
        with warnings.catch_warnings(), pytest.warns(UserWarning, match=match):
            entry({"type": "ebft_chat_multiturn.transform_last_turn", **keys}, **method)
        with warnings.catch_warnings(), pytest.warns(UserWarning, match="^roles_to_train: no effect with type: ebft_r"):
            entry({"type": "ebft_reasoning.transform_strided"}, roles_to_train=["user"], **method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry(keys, **STRIDED)
        entry({"type": "ebft_strided_chat", **keys}, **STRIDED)
    with pytest.raises(ConfigError, match=f"train_on_inputs: true trains on all tokens, but datasets.0.{[*keys][0]}"):
        entry(keys, train_on_inputs=True)


def test_empty_names_of_columns_and_prompts_are_unset():
    given = {"system_prompt": "", "field_system": "", "field_input": "", "system_format": "", "format": "{instruction}"}
    found = DatasetEntry(path="x", type=given)
    assert found == DatasetEntry(path="x", type={"system_format": "", "format": "{instruction}"})
    assert found.user_defined.field_input == "input" and found.user_defined.system_prompt is None
    columns = {"field_prompt": "q", "field_system": "", "field_chosen": ""}
    assert DatasetEntry(path="x", type=columns).type == DatasetEntry(path="x", type={"field_prompt": "q"}).type
    keys = {"system_prompt": "", "field_system": "", "field_messages": "", "field_thinking": ""}
    assert DatasetEntry(path="x", type="chat_template", **keys) == DatasetEntry(path="x", type="chat_template")


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
        for method in ({}, PROMPTS, STRIDED):
            entry(keys, **method)
    assert entry({"roles_to_train": [], "message_field_training": "train"}).roles_to_train == []


@pytest.mark.filterwarnings("ignore:datasets.type")
@pytest.mark.parametrize(("values", "keys", "message"), [
    ({"preprocess_shards": 4}, {}, "datasets.0.preprocess_shards has no effect"),
    ({"field_tools": "functions"}, PROMPTS, "datasets.0.field_tools: no effect with rl: grpo"),
    ({"train_on_eos": "all"}, STRIDED, "datasets.0.train_on_eos: all has the effect of turn in strided mode"),
    ({}, {"eot_tokens": ["<end_of_turn>"]}, "eot_tokens: .* has no effect: the end of a turn is"),
])  # fmt: skip
def test_keys_without_effect_give_a_warning(entry, values, keys, message):
    with pytest.warns(UserWarning, match=message):
        entry(values, **keys)


def test_a_chat_template_of_the_datasets(make):
    entries = [{"path": "x", "type": "chat_template", "chat_template": name} for name in ("chatml", "chatml")]
    assert make(datasets=entries).chat_template == "chatml"
    assert make(datasets=entries, chat_template="chatml").chat_template == "chatml"
    with pytest.raises(ConfigError, match=r"datasets.0.chat_template: 'chatml' differs from 'llama3' of the config"):
        make(datasets=entries, chat_template="llama3")
    with pytest.raises(ConfigError, match=r"datasets.1.chat_template: 'llama3' differs from 'chatml'"):
        make(datasets=[entries[0], {**entries[1], "chat_template": "llama3"}])


@pytest.mark.parametrize(("keys", "message"), [
    ({"default_system_message": 1}, "set system_prompt of the datasets"),
    ({"dataset_shard_num": 1}, "set shards of the datasets"),
    ({"dataset_processes": 1}, "Use 'dataset_num_proc' instead"),
    ({"rl": "dpo", "excess_length_strategy": "truncate"}, "truncate is not supported with .*always drop. Remove it"),
    ({**PROMPTS, "excess_length_strategy": "raise"}, "raise is not supported with .*always drop. Remove it"),
    ({"rl": None, "process_reward_model": True, "excess_length_strategy": "drop"},
     "where it is always truncate. Remove it"),
])  # fmt: skip
def test_keys_that_are_elsewhere_or_that_a_method_does_not_have(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(**keys)
