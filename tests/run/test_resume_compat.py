"""What a resumed run continues with that differs from the run that saved its checkpoint: a warning for each."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ebft.config.section import flat_settings
from ebft.methods.method import foreign_keys
from ebft.run import resume_compat as compat
from ebft.run.config.schema import RunConfig
from ebft.run.resume_compat import NOT_COMPARED, optimizer_keys, run_record, warn_of_changes, write_run_keys
from tests.config.conftest import warned
from tests.run.crash import config_of
from tests.run.prepared.test_key import changed

SELECT = ("rl", "ebft.mode", "reward_model", "process_reward_model")
ELSEWHERE = {*compat.FIXED, *compat.OF_OPTIMIZER, "lr_groups", "embedding_lr", "embedding_lr_scale"}
ELSEWHERE |= {"loraplus_lr_ratio", "loraplus_lr_embedding"}
FAMILIES = ("sft", "stream", "strided", "structured_full", "grpo", "dpo", "kto", "orpo", "simpo", "reward_model")
URL = "https://example.com/reward?token=abcdefgh"


@pytest.mark.first(3)
@pytest.mark.filterwarnings("ignore:(?s)Pydantic serializer warnings.*another")
@pytest.mark.parametrize("family", [*FAMILIES, "process_reward_model"])
def test_every_key_is_compared_or_listed_with_a_reason(family):
    """A key that changes gives a line, unless it is listed, or not read by the method."""
    config = config_of(family, Path("inputs"), Path("out"))
    all_of = lambda each: compat.run_keys(each) | compat.compared_settings(each, False) | optimizer_keys(each, None)
    before, idle = all_of(config), foreign_keys(config) | {"ebft", "trl", "vllm", "bf16"}
    idle -= {"structured_full": {"ebft", "trl"}, "grpo": {"ebft", "trl"}, "strided": {"ebft"}}.get(family, set())
    keys = [key for key, _ in flat_settings(config) if key not in (*SELECT, "base_model", "gguf_file")]
    assert len(keys) > 300 and NOT_COMPARED.keys() > ELSEWHERE
    known = {key for key, _ in flat_settings(config)}
    assert NOT_COMPARED.keys() <= known | {key.partition(".")[0] for key in known}
    for key in keys:
        now = all_of(changed(config, key, "another"))
        differs = any(name in before and before[name] != now[name] for name in now)
        of_adapter = key in compat.FIXED and key.startswith(("lora_", "peft_"))
        unread = key.partition(".")[0] in idle or (config.adapter is None and of_adapter)
        unread |= config.adapter is not None and key == "unfrozen_parameters"
        listed = key in NOT_COMPARED or key.partition(".")[0] in NOT_COMPARED
        assert differs != (unread or (listed and key not in ELSEWHERE)), key


@pytest.fixture
def inputs(tiny_llama_dir, tmp_path, monkeypatch):
    """A folder with the inputs of a run, which is the working directory."""
    folder = tmp_path / "here"
    shutil.copytree(tiny_llama_dir, folder / "model")
    shutil.copytree(tiny_llama_dir, folder / "reward")
    (folder / "rows.jsonl").write_text('{"text": "one"}\n' * 3)
    (folder / "own_rewards.py").write_text("from own_parts import part\ndef score(**columns): return part\n")
    (folder / "own_parts.py").write_text("part = [1.0]\n")
    (folder / "template.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for name in ("own_rewards", "own_parts"):  # of another test's folder
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


ROWS = [{"path": "rows.jsonl", "type": "ebft_opencode.transform"}]
KEYS = {"base_model": "model", "rl": "grpo", "datasets": ROWS, "test_datasets": ROWS, "chat_template": "template.jinja"}
KEYS |= {"trl": {"num_generations": 2, "reward_funcs": ["own_rewards.score", "./reward"]}}


def record(changes, processes=1):
    config, _ = warned(RunConfig.from_dict, {**KEYS, **changes, "output_dir": "out"})
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_config or config.base_model)
    if config.chat_template:
        tokenizer.chat_template = Path(config.chat_template).read_text()
    sizes = {"train_batch_size": config.micro_batch_size, "gradient_accumulation_steps": 8 // config.micro_batch_size}
    return config, run_record(config, tokenizer, SimpleNamespace(bf16=False, world_size=processes, **sizes), [])


@pytest.fixture
def lines(inputs):
    """`lines(changes, act)`: warnings of a run that is resumed with changed keys after `act` has changed its inputs."""

    def of(changes, act=lambda folder: None, saved=None, is_finished=False, processes=1):
        config, before = record(saved or {})
        checkpoint = inputs / "out" / "checkpoint-3"
        checkpoint.mkdir(parents=True, exist_ok=True)
        write_run_keys(config, checkpoint, before | optimizer_keys(config, None))
        act(inputs)
        config, now = record(changes, processes)
        _, said = warned(warn_of_changes, config, now, checkpoint, is_finished)
        return [text.replace(f" ({checkpoint})", "") for text in said]

    return of


def of_model(change, folder="model"):
    def act(inputs):
        path = inputs / folder / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, {"format": "pt"})

    return act


def one_value(weights):
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] += 1e-3


def of_file(name, old, new):
    def act(inputs):
        text = (inputs / name).read_text()
        assert old in text
        (inputs / name).write_text(text.replace(old, new))

    return act


NOTHING = lambda folder: None
OF_TRL = {"trl": {**KEYS["trl"], "beta": 0.1, "temperature": 1.0}}
EPSILON = of_file("model/config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
PREFIX = of_file("model/tokenizer.json", '"add_prefix_space": false', '"add_prefix_space": true')


@pytest.mark.parametrize(("changes", "act", "expected"), [
    ({}, of_model(one_value), ["other weights of base_model: model. The trained weights come from the checkpoint"]),
    ({}, of_model(one_value, "reward"), ["another model in the folder of trl.reward_funcs: ./reward"]),
    ({}, EPSILON, ["config.json: rms_norm_eps: 1e-05 instead of 1e-06"]),
    ({}, PREFIX, ["other contents of the tokenizer's files: tokenizer.json"]),
    ({}, of_file("template.jinja", "[0]", "[1]"), ["chat_template: another text of template.jinja"]),
    ({}, of_file("own_parts.py", "1.0", "2.0"), ["other code in own_parts. It applies from here on"]),
    ({}, of_file("rows.jsonl", "one", "two"), [
        "other contents of datasets: rows.jsonl. Training continues after the same number", "test_datasets: rows"]),
    (OF_TRL, of_model(one_value), [
        "trl.beta: 0.1 instead of null. It applies from here on, without effect on earlier steps",
        "trl.temperature: 1.0 instead of 0.7", "other weights of base_model"]),
    ({"seed": 7, "sequence_len": 99}, NOTHING, ["seed: 7 instead", "sequence_len: 99"]),
    ({"metric_for_best_model": "loss"}, NOTHING, ["metric_for_best_model: loss instead of null"]),
    ({}, NOTHING, ["16 rows per step instead of 8 (2 processes instead of 1, micro_batch_size: 1"]),
])  # fmt: skip
def test_each_change_is_a_line(lines, changes, act, expected):
    found = lines(changes, act, processes=2 if "rows per step" in expected[0] else 1)
    assert len(found) == len(expected), found
    for line, part in zip(found, expected):
        assert line.startswith("Resumed with ") and part in line, line


def move(inputs):
    """The same inputs under other paths, and the weights in two files."""
    for name, other in (("model", "moved"), ("reward", "moved/reward"), ("rows.jsonl", "lines.jsonl")):
        (inputs / name).rename(inputs / other)
    (inputs / "template.jinja").rename(inputs / "moved.jinja")
    path = inputs / "moved" / "model.safetensors"
    weights = load_file(path)
    names = sorted(weights)
    parts = {"model-1-of-2.safetensors": names[:5], "model-2-of-2.safetensors": names[5:]}
    for name, part in parts.items():
        save_file({key: weights[key] for key in part}, path.with_name(name), {"format": "pt"})
    places = {key: name for name, part in parts.items() for key in part}
    path.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    path.unlink()


LINES = [{**ROWS[0], "path": "lines.jsonl"}]
MOVED = {"base_model": "moved", "datasets": LINES, "test_datasets": LINES, "chat_template": "moved.jinja"}
MOVED |= {"trl": {**KEYS["trl"], "reward_funcs": ["own_rewards.score", "./moved/reward"]}}
FREE = {"max_steps": 9, "num_epochs": 3, "micro_batch_size": 4, "logging_steps": 7, "save_steps": 5, "eval_steps": 2}
FREE |= {"hub_model_id": "a/b", "wandb_project": "x", "use_ray": True, "gradient_checkpointing": True}
VERSION = of_file("model/config.json", '"transformers_version": "', '"transformers_version": "1')
MAY_CHANGE = [(MOVED, move), ({**FREE, "dataloader_num_workers": 1}, NOTHING), ({}, VERSION)]


@pytest.mark.parametrize(("changes", "act"), MAY_CHANGE)
def test_what_may_change_gives_no_line(lines, changes, act):
    assert lines(changes, act) == []


def test_a_finished_run_and_a_sweep(inputs, lines):
    folder, changes = inputs / "out" / "checkpoint-3", {"seed": 1, "learning_rate": 0.1}
    assert lines(changes, is_finished=True) == [
        f"No effect: seed: 1 instead of 42. The run of {folder} is complete.",
        f"No effect: learning_rate: 0.1 instead of 1e-05. The run of {folder} is complete.",
    ]
    for key, value in {"max_steps": 3, **changes}.items():  # a sweep starts runs with other settings again
        assert compat.has_other_settings(record({key: value})[0], folder) is (key in changes)


def test_secrets_are_not_stored_and_long_values_are_shortened(inputs, lines):
    keys = {"datasets": [{**ROWS[0], "path": URL}], "test_datasets": []}
    kwargs = {"generation_kwargs": {"api_key": "s3cr3t", "a": "b" * 999}}
    (found,) = lines({**keys, "trl": {**KEYS["trl"], **kwargs}}, saved=keys)
    assert len(found) < 600 and "s3cr3t" not in found
    stored = (inputs / "out" / "checkpoint-3" / "ebft_run.json").read_text()
    assert "abcdefgh" not in stored and "trl.temperature" in stored
