"""Keys of streams: other spellings of the same config, contradictions, and keys without effect."""

import warnings

import pytest

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError
from tests.config.conftest import MINIMAL

ENTRY = {"path": "some/data"}


def config(**keys):
    values = {"base_model": "some/model", "max_steps": 10, **keys}
    return RunConfig.from_dict({key: value for key, value in values.items() if value is not None})


def stream(**keys):
    return config(datasets=MINIMAL["datasets"], streaming=True, **keys)


@pytest.mark.parametrize("given", ["some/data", ENTRY, [{**ENTRY, "type": "pretrain"}], [
    {**ENTRY, "split": "train", "skip": 0, "trust_remote_code": False, "name": None}]])  # fmt: skip
def test_a_pretraining_dataset_is_a_stream_of_datasets(given):
    with warnings.catch_warnings(action="error"):
        first = config(pretraining_dataset=given)
    assert first.model_dump() == stream().model_dump()
    assert RunConfig.from_dict(first.model_dump(exclude_defaults=True)).model_dump() == first.model_dump()


def test_the_keys_of_its_entries_are_those_of_datasets():
    entry = {"path": "json", "data_files": ["a.jsonl"], "text_column": "body", "skip": 3, "split": "test", "name": "en"}
    entry["weight"] = 0.25
    (found,) = config(pretraining_dataset=[entry]).datasets
    assert (found.path, found.data_files, found.field, found.skip) == ("json", ["a.jsonl"], "body", 3)
    assert (found.split, found.name, found.type, found.weight) == ("test", "en", "completion", 0.25)
    assert stream(pretrain_multipack_buffer_size=7).streaming_multipack_buffer_size == 7
    schema = RunConfig.model_json_schema()
    assert schema["required"] == ["base_model"]  # editors accept either key
    assert schema["anyOf"] == [{"required": ["datasets"]}, {"required": ["pretraining_dataset"]}]


@pytest.mark.parametrize(("keys", "message"), [
    ({"pretraining_dataset": ENTRY, "max_steps": None}, "max_steps is missing: a stream has no length"),
    ({"pretraining_dataset": ENTRY, "datasets": MINIMAL["datasets"]}, "pretraining_dataset and datasets are both"),
    ({"pretraining_dataset": ENTRY, "streaming": False}, "pretraining_dataset is a stream, but streaming is false"),
    ({"pretraining_dataset": {**ENTRY, "type": "chat_template"}}, "pretraining_dataset.0.type: invalid value"),
    ({"pretraining_dataset": {**ENTRY, "txt": 1}}, "Unknown key 'pretraining_dataset.0.txt'"),
    ({"pretraining_dataset": []}, "pretraining_dataset: invalid value"),
    ({"pretraining_dataset": {**ENTRY, "trust_remote_code": True}}, "datasets.0.trust_remote_code: datasets that"),
    ({"pretraining_dataset": {**ENTRY, "split": "train[:9]"}}, "split: train\\[:9\\] is not supported .*Set skip"),
    ({"datasets": MINIMAL["datasets"], "streaming": True, "val_set_size": 2}, "val_set_size is not supported with"),
    ({"pretraining_dataset": ENTRY, "group_by_length": True}, "group_by_length is not supported with streaming"),
    ({"pretraining_dataset": ENTRY, "dataloader_num_workers": 4}, "dataloader_num_workers: 4 is not .*to 1 or 0"),
    ({"datasets": [{**ENTRY, "type": "chat_template"}], "streaming": True},
     "datasets.0.type: chat_template is not supported with streaming.*type: completion"),
    ({"datasets": [{**ENTRY, "type": "completion", "shards": 2}], "streaming": True},
     "datasets.0.shards is not supported with streaming"),
    ({"datasets": [{**ENTRY, "type": "completion", "skip": 2}]},
     "datasets.0.skip is only read with streaming: true. Set split: train\\[2:\\]"),
    ({"pretraining_dataset": ENTRY, "rl": "ebft", "ebft": {"mode": "strided"}},
     "streaming is not supported with strided mode.*train\\[:100000\\]"),
    ({"pretraining_dataset": ENTRY, "reward_model": True}, "streaming is not supported with"),
    ({"pretraining_dataset": ENTRY, "streaming_multipack_buffer_size": 3, "pretrain_multipack_buffer_size": 4},
     "two names of the same key"),
    ({"pretraining_dataset": ENTRY, "streaming_multipack_buffer_size": 0}, "a value of at least 1"),
    ({"pretraining_dataset": {**ENTRY, "weight": 0}}, "weight: invalid value 0; expected a value above"),
    ({"pretraining_dataset": ENTRY, "excess_length_strategy": "drop"},
     "excess_length_strategy is not supported with streaming, where documents are cut"),
    ({"pretraining_dataset": ENTRY, "dataset_exact_deduplication": True},
     "dataset_exact_deduplication is not supported with streaming, which does not keep"),
    ({"pretraining_dataset": ENTRY, "dispatch_batches": True}, "dispatch_batches is not supported"),
])  # fmt: skip
def test_what_does_not_fit_a_stream_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        config(**keys)


@pytest.mark.parametrize(("keys", "message"), [
    ({"streaming": True, "dataset_prepared_path": "rows"}, "dataset_prepared_path has no effect with streaming"),
    ({"streaming": True, "dataset_num_proc": 4}, "dataset_num_proc has no effect with streaming"),
    ({"streaming": True, "sample_packing": False}, "sample_packing: false has no effect with streaming"),
    ({"pretrain_multipack_attn": False}, "pretrain_multipack_attn: no effect because streaming is not set"),
    ({"streaming_multipack_buffer_size": 7}, "streaming_multipack_buffer_size: no effect because streaming is not"),
])  # fmt: skip
def test_keys_without_effect_give_a_warning(keys, message):
    with pytest.warns(UserWarning, match=message):
        config(datasets=MINIMAL["datasets"], **keys)


def test_keys_that_describe_a_stream_give_no_warning():
    with warnings.catch_warnings(action="error"):
        for keys in ({"sample_packing": True}, {"skip_prepare_dataset": True}, {"dataset_num_proc": 1}):
            stream(**keys)
