"""Files and overrides: what they become, and what is wrong with them."""

import functools

import pytest

from ebft.config.axolotl import UNSUPPORTED_KEYS
from ebft.config.schema import load_config
from ebft.errors import ConfigError, EBFTError


def assert_fails(path, *parts, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


STRIDED = "rl: ebft\nebft: {mode: strided}\n"


@pytest.mark.parametrize(("text", "overrides", "expected"), [
    ("", [], {"base_model": "some/model", "rl": None}),
    ("learning_rate: 1e-5\nadam_epsilon: 1E-9\nweight_decay: 2.5e-2\n", [],
     {"learning_rate": 1e-5, "adam_epsilon": 1e-9, "weight_decay": 0.025}),
    ("max_steps: -1\n", [], {"max_steps": None}),
    # Words that only YAML 1.1 takes for something else.
    ("wandb_name: 1:30\nwandb_project: yes\nsave_strategy: no\nwandb_entity: 2024-02-30\n", [],
     {"wandb_name": "1:30", "wandb_project": "yes", "save_strategy": "no", "wandb_entity": "2024-02-30"}),
    (STRIDED, ["ebft.stride=4", "learning_rate=1e-5", "ebft.use_whitening=true", "ebft.feature_layers=[0.5]"],
     {"ebft.stride": 4, "learning_rate": 1e-5, "ebft.use_whitening": True, "ebft.feature_layers": [0.5]}),
    ("", ["special_tokens.pad_token=<pad>"], {"special_tokens.pad_token": "<pad>"}),
    ("max_steps: 5\n", ["max_steps="], {"max_steps": None}), ("", ["wandb_name=a=b"], {"wandb_name": "a=b"}),
])  # fmt: skip
def test_what_a_file_and_overrides_become(write, text, overrides, expected):
    config = load_config(write(text), overrides)
    assert {name: functools.reduce(getattr, name.split("."), config) for name in expected} == expected


def test_elements_and_whole_lists_in_overrides(write):
    config = load_config(write(), ["datasets.0.path=notes.txt", "datasets.1.path=b", "datasets.1.type=completion"])
    assert [entry.path for entry in config.datasets] == ["notes.txt", "b"]
    config = load_config(write(), ["datasets=[{path: x, type: y.transform}]"])
    assert [(entry.path, entry.type) for entry in config.datasets] == [("x", "y.transform")]


def test_an_override_does_not_reach_the_anchor_through_its_alias(write):
    text = "test_datasets: &held_out [{path: a, type: completion}]\n"
    path = write(f"base_model: m\n{text}datasets: *held_out\n", required=False)
    config = load_config(path, ["datasets.0.split=train[:75%]", "test_datasets.0.split=train[75%:]"])
    assert (config.datasets[0].split, config.test_datasets[0].split) == ("train[:75%]", "train[75%:]")


def test_files_that_are_no_config(write, tmp_path):
    assert issubclass(ConfigError, EBFTError) and issubclass(EBFTError, ValueError)
    assert_fails(tmp_path / "absent.yaml", "absent.yaml", "No such file", "Give the path")
    for text, *parts in (("", "is empty", "base_model"), ("- a\n", "key: value"),
                         ("seed: 1\n", "base_model is missing", "datasets is missing")):  # fmt: skip
        assert_fails(write(text, required=False), *parts)
    levels = "".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    assert_fails(write(f"fsdp_config:\n  a0: &a0 1\n{levels}"), "more than 100000 values")


@pytest.mark.parametrize(("text", "message"), [
    ("ebft: [1,\n", "run.yaml, line 6: invalid YAML"), ("seed: 1\nseed: 2\n", "run.yaml, line 6"),
    ("seed: 1\nseed: 2\n", 'duplicate key "seed"'),
    ("? [a]\n: 1\n", "invalid YAML: a key must be a scalar"),
    ("{a: b}: c\n", "invalid YAML"),
    ("wandb_name: &x [*x]\n", "an alias (*name) refers to a value that contains it"),
    ("seed: 012\n", "line 5: invalid YAML: the number 012 is ambiguous"),
    ("seed: !!int abc\n", "line 5: invalid YAML: the value 'abc' does not have the type"),
    ("%YAML 1.1\n---\nseed: 1\n", "invalid YAML: configs are read as YAML 1.2"),
    ("seed: " + "[" * 3000 + "\n", "invalid YAML"),
    ("learning_rate: high\n", "learning_rate: invalid value 'high'; expected a number."),
    ("micro_batch_size: 0\n", "micro_batch_size: invalid value 0; expected a value of at least 1."),
    ("micro_batch_size: true\n", "micro_batch_size: invalid value True; expected an integer."),
    ("gradient_checkpointing: offload_disk\n",
     "gradient_checkpointing: offload_disk is not supported: activations are recomputed, and not offloaded. Use "
     "gradient_checkpointing: true."),
    ("bf16: maybe\n", "bf16: invalid value 'maybe'; expected true or false or 'auto'."),
    ("seed: 5000000000\n", "seed: invalid value 5000000000; expected a value of at most 4294967295."),
    ("rl: sft\n",
     "rl: invalid value 'sft'; expected 'ebft', 'grpo', 'gdpo', 'dpo', 'ipo', 'kto', 'orpo' or 'simpo' (leave "
     "it out for SFT)."),
    ("rl: ebft\nebft: {stride: 1e23}\n", "ebft.stride: invalid value 1e+23"),
    ("rl: ebft\nebft: {stride: 3000000}\n", "at most 1000000"),
    ("wandb_name: 7\n", "put it in quotes"),
    ("val_set_size: 1.5\n", "val_set_size: invalid value 1.5; expected a value below 1.0 or an integer."),
    ("learning_rate: .nan\n", "expected a finite number"),
    *((f"special_tokens: {{{name}: ''}}\n", f"special_tokens.{name}: invalid value ''; expected a non-empty string.")
          for name in ("pad_token", "eos_token", "bos_token", "unk_token")),
    ("lora_target_modules: ''\n", "lora_target_modules: invalid value ''; expected a non-empty string or a list."),
    ("lora_target_modules: []\n", "lora_target_modules: invalid value []; expected "),
    ("lora_target_modules: []\n", "or a list with at least 1 element."),
    ("evaluation: {temperature: 0.0001}\n",
     "evaluation.temperature: invalid value 0.0001; expected a value of at least 0.001."),
    ("seed: x\nlora_dropout: 2\n", "seed: invalid value 'x'"),
    ("seed: x\nlora_dropout: 2\n", "lora_dropout: invalid value 2"),
    ("resume_from_checkpoint: true\n", "invalid value true; expected the folder of a checkpoint"),
    ("resume_from_checkpoint: true\n", "auto_resume_from_checkpoints: true"),
])  # fmt: skip
def test_what_is_wrong_with_a_file_is_told_in_words(write, text, message):
    assert_fails(write(text), message)


@pytest.mark.parametrize(("text", "unknown", "nearest"), [
    ("learning_rte: 1.0e-5\n", "'learning_rte'", "'learning_rate'"),
    ("rl: ebft\nebft:\n  stryde: 4\n", "'ebft.stryde'", "'ebft.stride'"),
    ("special_tokens:\n  pad: x\n", "'special_tokens.pad'", "'special_tokens.pad_token'"),
    ("stride: 4\n", "'stride'", "'ebft.stride'"),
    ("special_tokens: {bos: x}\n", "'special_tokens.bos'", "'special_tokens.bos_token'"),
    ("unlike_anything: 1\n", "'unlike_anything'", "Run `ebft config` to list all keys"),
    ("num_train_epochs: 2\n", "'num_train_epochs'", "Use 'num_epochs' instead"),
    ("lora_rank: 8\n", "'lora_rank'", "Use 'lora_r' instead"),
    ("trl: {max_new_tokens: 8}\n", "'trl.max_new_tokens'", "Use 'trl.max_completion_length' instead"),
    ("fsdp_release: 2\n", "'fsdp_release'", "Run `ebft config` to list all keys"),
])  # fmt: skip
def test_an_unknown_key_names_the_nearest(write, text, unknown, nearest):
    assert_fails(write(text), "Unknown key", unknown, nearest)


def test_a_key_of_other_trainers_says_what_to_do(make):
    for key, reason in UNSUPPORTED_KEYS.items():
        with pytest.raises(ConfigError) as caught:
            make(**{key: 1})
        assert f"{key} is not supported: {reason}." in str(caught.value)


@pytest.mark.parametrize(("override", "parts"), [
    ("stride", ("'stride'; expected key=value", "ebft.stride=4")), ("=4", ("expected key=value",)),
    ("base_model.x=1", ("cannot set 'x' in 'some/model'",)),
    ("datasets.7.path=a", ("'7' is not a valid index for a list of length 1",)),
    ("datasets.first.path=a", ("'first'",)),
    ("datasets.².path=a", ("not a valid index for a list of length 1",)),
    ("--learning-rate=1e-4", ("without dashes: learning_rate=1e-4",)), ("seed=[", ("not valid YAML", "Quote it")),
    ("ebft.strid=1", ("Unknown key 'ebft.strid'", "'ebft.stride'")),
    ("datasets.0.splt=train", ("'datasets.0.splt'", "'datasets.0.split'")),
    ("datasets=[]", ("datasets: invalid value []",)),
])  # fmt: skip
def test_a_wrong_override_says_what_to_type(write, override, parts):
    assert_fails(write(), *parts, overrides=[override])


def test_one_text_is_not_a_list_of_overrides(write):
    assert_fails(write(), "must be a list", overrides="seed=1")
