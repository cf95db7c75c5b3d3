"""Plugins by their import path: callbacks, rollouts, and the hooks of axolotl's plugins."""

import json
from types import SimpleNamespace

import pytest
import torch
from pydantic import BaseModel
from transformers import TrainerCallback

from ebft import train
from ebft.errors import ConfigError, NonFiniteLossError
from ebft.run import plugins
from tests.golden.runs import spaces_and_es
from tests.run.conftest import LORA, STRIDED, strided
from tests.run.crash import config_of

PATH = f"{__name__}."  # a config names plugins by their path
LOGGED = {"ebft": {**STRIDED["ebft"], "log_completions": True}}
SEEN = []


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        SEEN.append(state.global_step)


class Rollouts:
    def on_rollouts_scored(self, rollouts, rewards):
        SEEN.append((rollouts, rewards))


class Both(Steps, Rollouts): ...


class Changes(Steps):
    def on_rollouts_scored(self, rollouts, rewards):
        rewards.zero_()
        rollouts.clear()


class Ruins(TrainerCallback):
    def on_train_end(self, args, state, control, model=None, **kwargs):
        next(each for each in model.parameters() if each.requires_grad).data.view(-1)[0] = float("nan")


class Hooks:
    """Every hook that plugins of axolotl have, as they declare them."""

    def register(self, cfg):
        SEEN.append(("register", cfg.my_key, cfg.not_a_key, cfg.ebft.stride, cfg["adapter"], "lora_r" in cfg))
        cfg.own = 1

    def get_input_args(self):
        return PATH + "Arguments"

    def add_callbacks_pre_trainer(self, cfg, model):
        return [Steps()]

    def create_optimizer(self, cfg, trainer):
        return torch.optim.SGD([each for each in trainer.model.parameters() if each.requires_grad], lr=0.5)

    def create_lr_scheduler(self, cfg, trainer, optimizer, num_training_steps):
        SEEN.append(("schedule", type(optimizer).__name__, num_training_steps))
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def on_rollouts_scored(self, cfg, trainer, prompts, completions, rewards, advantages):
        SEEN.append((cfg.own, trainer.state.global_step, prompts, completions, rewards, advantages))


def note(hook):
    """The hook of a plugin that notes its call, and whether its model has an adapter."""
    return lambda self, cfg, *given: SEEN.append((hook, *(hasattr(each, "peft_config") for each in given)))


AROUND_THE_MODEL = ("post_model_build", "pre_lora_load", "post_lora_load", "post_model_load")
for each in ("pre_model_load", *AROUND_THE_MODEL, "post_trainer_create", "post_train", "post_train_unload"):
    setattr(Hooks, each, note(each))


class BasePlugin:
    """As axolotl's, which declares all hooks."""

    on_rollouts_scored = load_datasets = None


class Inherits(BasePlugin):
    pre_model_load = note("pre_model_load")


class Arguments(BaseModel):
    my_key: int = 3


class Fails:
    def on_rollouts_scored(self, cfg, trainer, prompts, completions, rewards, advantages):
        raise KeyError("missing")

    def post_train(self, cfg, model):
        raise KeyError("late")


class FailsEarly:
    def pre_model_load(self, cfg):
        raise KeyError("early")


class Sets:
    def register(self, cfg):
        cfg.learning_rate = 1.0


class LoadsRows:
    def load_datasets(self, cfg, preprocess=False):
        return {"train_dataset": []}


@pytest.fixture(autouse=True)
def seen():
    SEEN.clear()
    return SEEN


def test_callbacks_and_rollouts_of_a_strided_run(make, seen, out, tmp_path):
    """What a plugin changes in them does not reach another one."""
    with pytest.raises(ConfigError, match="has on_rollouts_scored, but this method samples no rollouts"):
        train(make(plugins=[PATH + "Both"], output_dir=tmp_path / "elsewhere"))
    train(strided(make, plugins=[PATH + "Changes", PATH + "Both"], **LOGGED))
    assert [entry for entry in seen if isinstance(entry, int)] == [1, 1, 2, 2]
    calls = [entry for entry in seen if not isinstance(entry, int)]
    assert len(calls) == 2
    logged = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert [entry for entries, _ in calls for entry in entries] == logged
    for entries, rewards in calls:
        first = entries[0]["blocks"][0]["samples"]
        assert rewards[0, :, 0].tolist() == pytest.approx([sample["rewards"] for sample in first])
        assert isinstance(entries[0]["document"], str)


def test_hooks_of_plugins_of_axolotl(make, seen, out):
    result = train(strided(make, plugins=[PATH + "Hooks"], my_key=7, **LOGGED, **LORA))
    scored = [entry for entry in seen if isinstance(entry, tuple) and entry[0] == 1]
    assert [entry for entry in seen if entry not in scored] == [
        ("register", 7, None, 8, "lora", True), ("pre_model_load",), ("post_model_build", False),
        ("pre_lora_load", False), ("post_lora_load", True), ("post_model_load", True), ("post_trainer_create", False),
        ("schedule", "SGD", 2), 1, 2, ("post_train", True), ("post_train_unload",),
    ]  # fmt: skip
    assert [entry["learning_rate"] for entry in result.trainer.state.log_history if "loss" in entry] == [0.5, 0.25]
    logged = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    samples = [each for entry in logged for block in entry["blocks"] for each in block["samples"]]
    prompts, completions, rewards, advantages = ([*a, *b] for a, b in zip(*(entry[2:] for entry in scored)))
    assert completions == [each["completion"] for each in samples]
    assert advantages == [each["advantages"] for each in samples]
    assert scored[0][4].keys() == {"feature_matching"} and len(prompts) == len(samples)
    assert logged[0]["document"].startswith(prompts[0])


def test_the_first_process_has_the_samples_of_all(monkeypatch):
    monkeypatch.setattr(plugins, "gather_object", lambda found: [*found, *found])
    block = {"offset": 1, "samples": [{"rewards": 1.0, "advantages": 0.5, "completion": "bc"}]}
    entries, calls = [{"document": "abc", "blocks": [block]}], []
    for is_first in (True, False):
        trainer = SimpleNamespace(is_world_process_zero=lambda is_first=is_first: is_first)
        plugins._by_sample(lambda *given: calls.append(given[2:]), None, trainer)(entries, None)
    assert calls == [(["a", "a"], ["bc", "bc"], {"feature_matching": [1.0, 1.0]}, [0.5, 0.5])]


def test_scored_completions_of_prompts(inputs, out, seen):
    config = config_of("grpo", inputs, out, plugins=[PATH + "Hooks"], max_steps=1)
    train(config)
    _, _, prompts, completions, rewards, advantages = next(entry for entry in seen if entry[0] == 1)
    assert len(prompts) == len(completions) == len(advantages) == 4 and all(map(isinstance, prompts, [str] * 4))
    assert prompts[0] == prompts[1] and sum(advantages[:2]) == pytest.approx(0.0, abs=1e-4)
    ((name, values),) = rewards.items()
    assert name == "spaces_and_es" and values == pytest.approx(spaces_and_es(completions))


def test_hooks_that_fail(make, tmp_path, seen):
    with pytest.warns(UserWarning) as caught:
        train(strided(make, plugins=[PATH + "Fails"]))
    said = [str(each.message) for each in caught if "Training goes on without it" in str(each.message)]
    assert len(said) == 2 and "on_rollouts_scored" in said[0] and "post_train" in said[1]
    with pytest.raises(ConfigError, match="Fails.on_rollouts_scored failed: KeyError: 'missing' "):
        train(strided(make, plugins=[PATH + "Fails"], plugins_strict=True, output_dir=tmp_path / "strict"))
    train(make(plugins=[PATH + "Inherits"], output_dir=tmp_path / "base"))  # the base class's hooks are none
    assert seen == [("pre_model_load",)]


@pytest.mark.parametrize(("name", "message"), [
    ("FailsEarly", "FailsEarly.pre_model_load failed: KeyError: 'early'"),
    ("Sets", "a plugin cannot change learning_rate of the config by setting cfg.learning_rate. Set it in the"),
    ("LoadsRows", "LoadsRows.load_datasets returned .*, but rows are read from datasets"),
])  # fmt: skip
def test_hooks_that_end_a_run_before_it_starts(make, name, message):
    with pytest.raises(ConfigError, match=message):
        train(make(plugins=[PATH + name]))


def test_keys_that_a_plugin_declares(make):
    keys = {"plugins": [PATH + "Hooks"], "plugin_args": {"note": "a"}}
    assert make(my_key=7, **keys).plugin_args == {"note": "a", "my_key": 7}
    with pytest.raises(ConfigError, match="get_input_args failed: .*my_key Input should be a valid integer"):
        train(strided(make, plugins=keys["plugins"], plugin_args={"my_key": "x"}))


def test_weights_that_are_not_finite_are_not_saved(make, out):
    said = "Weights are NaN or infinite after the last step .first.* was not saved"
    with pytest.raises(NonFiniteLossError, match=said):
        train(make(plugins=[PATH + "Ruins"]))
    assert json.loads((out / "ebft_final.json").read_text())["step"] is None
