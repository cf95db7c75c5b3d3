"""Files and overrides: what they become, and what is wrong with them."""

import functools
import json
import sys

import pytest

from ebft.config.user_functions import find_function
from ebft.errors import ConfigError, EBFTError
from ebft.run.checks import check_runnable
from ebft.run.config.schema import RunConfig, load_config
from tests.config.conftest import MINIMAL, STRIDED

LONGEST = 1500  # characters of an error
PLAIN = "base_model: model\ndatasets: [{path: rows.jsonl, type: completion}]\n"
TEXT = json.dumps({**MINIMAL, **STRIDED, "max_steps": 1, "learning_rate": 1e-4, "output_dir": "out"}, indent=1)


def assert_refused(parts, function, *arguments):
    with pytest.raises(EBFTError) as caught:
        function(*arguments)
    said = str(caught.value)
    assert [part for part in parts if part.lower() not in said.lower()] == [] and len(said) <= LONGEST, said


def checked(path, overrides=()):
    check_runnable(load_config(path, overrides))


def nested(name, value):
    """The keys STRIDED and MINIMAL with `value` at the dotted key `name`."""
    section, _, key = name.rpartition(".")
    keys = {**MINIMAL, **STRIDED}
    return {**keys, section: {**keys.get(section, {}), key: value}} if section else {**keys, name: value}


@pytest.mark.parametrize(("text", "overrides", "expected"), [
    ("", [], {"base_model": "some/model", "rl": None}),
    ("learning_rate: 1e-5\nadam_epsilon: 1E-9\nweight_decay: 2.5e-2\n", [],
     {"learning_rate": 1e-5, "adam_epsilon": 1e-9, "weight_decay": 0.025}),
    ("max_steps: -1\n", [], {"max_steps": None}), ("max_steps: null\nunlike_anything:\n", [], {"max_steps": None}),
    # Words that only YAML 1.1 takes for something else.
    ("wandb_name: 1:30\nwandb_project: yes\nsave_strategy: no\nwandb_entity: 2024-02-30\noutput_dir: no\n", [],
     {"wandb_name": "1:30", "wandb_project": "yes", "save_strategy": "no", "wandb_entity": "2024-02-30",
      "output_dir": "no"}),
    ("output_dir: >-\n  outputs/run\nchat_template: |\n  {{ messages }}\n", [],
     {"output_dir": "outputs/run", "chat_template": "{{ messages }}\n"}),
    ('chat_template: "x\\n%YAML 1.1 {{ a }}"\noutput_dir: modèle-東京\n', [],
     {"chat_template": "x\n%YAML 1.1 {{ a }}", "output_dir": "modèle-東京"}),
    ("test_datasets: &d [{path: a, type: completion}]\nmax_steps: 3\r\n", [], {"max_steps": 3}),
    ("rl: ebft\nebft: {mode: strided}\n",
     ["ebft.stride=4", "learning_rate=1e-5", "ebft.use_whitening=true", "ebft.feature_layers=[0.5,1]"],
     {"ebft.stride": 4, "learning_rate": 1e-5, "ebft.use_whitening": True, "ebft.feature_layers": [0.5, 1.0]}),
    ("", ["special_tokens.pad_token=<pad>"], {"special_tokens.pad_token": "<pad>"}),
    ("max_steps: 5\nrl: ebft\n", ["max_steps=", "rl="], {"max_steps": None, "rl": None}),
    *(("", [f"{key}={text}"], {key: value}) for key, text, value in (
        ("max_steps", "0x10", 16), ("max_steps", "0o10", 8), ("max_steps", "0b11", 3), ("max_steps", "1_000", 1000),
        ("max_steps", "+5", 5), ("max_steps", "-1", None), ("wandb_name", "1:30", "1:30"),
        ("wandb_name", "2024-01-01", "2024-01-01"), ("wandb_name", "a=b", "a=b"), ("warmup_steps", "0", 0),
        ("wandb_name", "run #3", "run #3"), ("wandb_name", '"a" # b', "a"),
        ("learning_rate", "0.010", 0.01), ("learning_rate", ".5", 0.5), ("output_dir", "'007'", "007"),
        ("output_dir", "\U0001f600", "\U0001f600"))),
])  # fmt: skip
def test_what_a_file_and_overrides_become(write, text, overrides, expected):
    config = load_config(write(text), overrides)
    assert {name: functools.reduce(getattr, name.split("."), config) for name in expected} == expected


def test_a_key_can_be_repeated_with_the_same_value(write):
    with pytest.warns(UserWarning, match="(seed|plugins) is set twice, to one value .lines (5 and 7|6 and 8)"):
        assert load_config(write("seed: 1\nmax_steps: 2\nseed:\n")).seed == 1
        assert load_config(write("plugins:\nseed: 1\nplugins: [a.B]\nseed:\n")).plugins == ["a.B"]


def test_elements_and_whole_lists_in_overrides(write):
    config = load_config(write(), ["datasets.0.path=notes.txt", "datasets.1.path=b", "datasets.1.type=completion"])
    assert [entry.path for entry in config.datasets] == ["notes.txt", "b"]
    config = load_config(write(), ["datasets=[{path: x, type: y.transform}]", "datasets.00.split=train[:2]"])
    assert [(entry.path, entry.type, entry.split) for entry in config.datasets] == [("x", "y.transform", "train[:2]")]


def test_an_override_does_not_reach_the_anchor_through_its_alias(write):
    text = "test_datasets: &held_out [{path: a, type: completion}]\n"
    path = write(f"base_model: m\n{text}datasets: *held_out\n", required=False)
    config = load_config(path, ["datasets.0.split=train[:75%]", "test_datasets.0.split=train[75%:]"])
    assert (config.datasets[0].split, config.test_datasets[0].split) == ("train[:75%]", "train[75%:]")
    merged = write("base_model: m\ndatasets:\n- &d {path: a, type: completion}\n- {<<: *d, path: b}\n", required=False)
    assert [entry.path for entry in load_config(merged).datasets] == ["a", "b"]


@pytest.mark.parametrize(("text", "parts"), [
    ("", ("run.yaml", "is empty", "base_model")), ("hello" * 2000, ("key: value",)),
    ("seed: 1\n", ("base_model is missing", "datasets is missing")), (b"base_model: caf\xe9\n", ("run.yaml", "UTF-8")),
    ("ebft:\n\tstride: 4\n", ("line 2", "tab")), ("datasets: [{path: a, type: b}\nrl: ebft\n", ("line",)),
    ("rl: ebft\nbase_model: model\nrl: grpo\n", ("run.yaml, line 3", 'duplicate key "rl"')),
    (PLAIN + "seed: 1\nseedd: 2\nebft: {strid: 4}\n", ("key 'seedd' (line 4).", "key 'ebft.strid' (line 5).")),
    ("base_model: !!python/object/apply:os.system ['touch pwned']\n", ("run.yaml",)),
    ("%YAML 1.1\n---\nbase_model: model\n", ("configs are read as YAML 1.2",)),
    ("[" * 1000, ("run.yaml",)), ("base_model: m\n~: 1\n", ("unknown key",)),
    (PLAIN + "output_dir: >\n  outputs/run\n", ("output_dir", ">-")),
    (PLAIN + "lr_scheduler_kwargs: {a: [.inf]}\n", ("lr_scheduler_kwargs", "finite")),
])  # fmt: skip
def test_a_file_that_is_no_config(tmp_path, text, parts):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(parts, load_config, path)


def test_keys_of_other_tools_are_warnings_in_files_alone(write):
    text = "image: a:1\nint: 1\nval_datasets: [{path: a, type: completion, notes: [1]}]\nrl: ebft\n"
    with pytest.warns(UserWarning) as found:
        config = load_config(write(text), ["ebft.mode=strided", "lr=0.5", "test_datasets.0.path=b"])
    said = [str(warning.message).partition(" (line ")[0] for warning in found]
    assert {f"Unknown key {key!r}" for key in ("image", "int", "test_datasets.0.notes")} <= {*said}
    assert (config.learning_rate, config.test_datasets[0].path) == (0.5, "b")
    with pytest.raises(ConfigError, match="Unknown key"):
        load_config(write("rl: ebft\n"), ["image=b"])
    for line, known in (("stride: 4", "ebft.stride"), ("rank: 4", "lora_"), ("ebft: {notes: 1}", "")):
        with pytest.raises(ConfigError, match=f"Unknown key .*{known}"):
            load_config(write(f"{line}\n"))


def test_datasets_without_a_type_or_path(write):
    text = "base_model: m\ndatasets: [{data_files: [a.json], ds_type: json}]\nrl: "
    for rl in ("dpo", "grpo\ntrl: {reward_funcs: [feature_matching]}"):
        found = load_config(write(text + rl, required=False)).datasets
        assert [(x.path, x.type) for x in found] == [("json", "passthrough")]


ROW = {"path": "rows.jsonl", "type": "ebft_pretrain.transform"}
VALUES = [  # a dotted key, values that it does not accept, and more that the message contains
    ("learning_rate", (0, True, {"start": 1}, "x" * 10_000, list(range(5000)))),
    ("learning_rate", ("high",), "learning_rate: invalid value 'high'; expected a valid number."),
    ("max_steps", (0, 1.5, "10")), ("max_steps", (2**63,), "less than or equal to 1000000000"),
    ("num_epochs", (1e300,), "1000000"),
    ("sequence_len", (1, "1k", 2**31)), ("warmup_steps", (1.5, 1e300)), ("adam_beta1", (1,)),
    ("lr_groups", ([{"name": "a", "modules": ["b"], "lr": 1e300}],), "lr_groups.0.lr"),
    ("val_set_size", (1.5,), "invalid value 1.5; expected a value less than 1 or a valid integer."),
    ("rl", ("sft",), "'orpo' or 'simpo' (leave it out for SFT)."),
    ("bf16", ("maybe",), "bf16: invalid value 'maybe'; expected true or false or 'auto'."),
    ("wandb_name", (7,), "put it in quotes"), ("output_dir", (["out"],)), ("base_model", ("", 5, " ")),
    ("datasets", ([], "rows.jsonl", {"path": "rows.jsonl", "type": "completion"}, [None])),
    ("datasets", ([{"path": "rows.jsonl"}], [{**ROW, "type": ""}]), "type"),
    ("datasets", ([{**ROW, "path": " "}],), "path"),
    ("datasets", ([{**ROW, "type": "ebft_pretrian.transform"}],), "ebft_pretrain"),
    ("datasets", ([{"path": f"rows{n}.jsonl", "type": 5, "x": 1} for n in range(200)],), "more"),
    ("datasets", ([{"path": "rows.jsonl", "type": "nemo_gym.transform"}],), "nemo_gym", "input_ids"),
    ("ebft.stride", (0,), "greater than or equal to 1"), ("ebft.stride", (2.5,), "a valid integer"),
    ("ebft.feature_layers", ([], [1.5], [0.5, 0.5], 0.5)), ("ebft.embed_method", ("max",), "'completion_mean'"),
    ("ebft.generate_max_len", (4096,), "sequence_len"), ("vllm.port", (70000,)),
]  # fmt: skip


def test_values_that_a_key_does_not_accept():
    for name, values, *more in VALUES:
        for value in values:
            check = lambda keys: check_runnable(RunConfig.from_dict(keys))
            assert_refused((name.rpartition(".")[2], *more), check, nested(name, value))


OVERRIDES = [
    ("x" * 5000, "key=value"), ("stride", "'stride': expected key=value", "ebft.stride=4"),
    ("--learning-rate=1e-4", "'--learning-rate'"), ("seed=[", "not valid YAML", "Quote it"),
    ("base_model.x=1", "cannot set 'x' in 'some/model'"),
    ("datasets.7.path=a", "'7' is not a valid index for a list of length 1"), ("datasets.1.path=a", "type"),
    ("datasets.0.splt=train", "'datasets.0.splt'", "'datasets.0.split'"), ("stride=4", "'stride'", "'ebft.stride'"),
    ("unlike_anything=1", "Unknown key 'unlike_anything'", "Run `ebft config` to list all keys"),
    *((f"learning_rate={text}", "learning_rate") for text in ("1e400", ".nan", "1,5")),
    ("chat_template=&a[*a]", "chat_template"),
]  # fmt: skip


def test_a_wrong_override_says_what_to_type(write):
    path = write("rl: ebft\nebft: {mode: strided, stride: 4}\n")
    for override, *parts in OVERRIDES:
        assert_refused(parts, checked, path, [override])


def test_modules_are_also_found_in_the_folder_of_the_config(tmp_path, monkeypatch):
    """Those in the working directory come first."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "configs"
    folder.mkdir()
    for place, name in ((folder, "only_beside_it"), (folder, "in_both_places"), (tmp_path, "in_both_places")):
        (place / f"{name}.py").write_text("def function(): ...")
    (folder / "run.yaml").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    load_config("configs/run.yaml")
    found = [find_function("key", f"{name}.function") for name in ("only_beside_it", "in_both_places")]
    expected = [str(folder / "only_beside_it.py"), str(tmp_path / "in_both_places.py")]
    assert [function.__code__.co_filename for function in found] == expected
    assert callable(find_function("key", "trl.rewards.think_format_reward"))  # of a module that imports its parts late
