"""What follows a run: plugins by their import path, and what ends it before its last step."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from ebft import train
from ebft.errors import ConfigError, NonFiniteLossError
from ebft.run.callbacks import check_plugins
from ebft.run.checks import check_runnable
from tests.run.conftest import STRIDED, assert_equal, strided

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


class SetsUp(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        torch.set_float32_matmul_precision("high")
        SEEN.append(torch.get_float32_matmul_precision())

    def on_step_end(self, args, state, control, **kwargs):
        SEEN.append(torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("medium")


class Ruins(TrainerCallback):
    def on_train_end(self, args, state, control, model=None, **kwargs):
        next(each for each in model.parameters() if each.requires_grad).data.view(-1)[0] = float("nan")


class Neither: ...


def function(): ...


class OtherArguments:
    def on_rollouts_scored(self, rollouts): ...


class NeedsArguments(Rollouts):
    def __init__(self, folder): ...


class Positional(TrainerCallback):
    def on_step_end(self, args, state, control): ...


class LogsOnly(TrainerCallback):
    def on_log(self, args, state, control, model, processing_class, optimizer, lr_scheduler, train_dataloader): ...


class Accepted(TrainerCallback):
    @staticmethod
    def on_rollouts_scored(rollouts, rewards): ...

    def on_log(self, args, state, control, logs=None, **kwargs): ...

    @classmethod
    def on_step_end(cls, *args, **kwargs): ...


@pytest.fixture(autouse=True)
def seen():
    SEEN.clear()
    return SEEN


def test_callbacks_and_rollouts_of_a_strided_run(make, seen, out):
    train(strided(make, plugins=[PATH + "Both"], **LOGGED))
    assert [entry for entry in seen if isinstance(entry, int)] == [1, 2]
    calls = [entry for entry in seen if not isinstance(entry, int)]
    assert len(calls) == 2
    logged = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert [entry for entries, _ in calls for entry in entries] == logged
    for entries, rewards in calls:
        first = entries[0]["blocks"][0]["samples"]
        assert rewards[0, :, 0].tolist() == pytest.approx([sample["rewards"] for sample in first])
        assert isinstance(entries[0]["document"], str)


def test_what_plugins_change(make, seen, tmp_path):
    with pytest.warns(UserWarning, match="Changes.on_rollouts_scored changed the rewards, which has no effect"):
        train(strided(make, plugins=[PATH + "Changes", PATH + "Rollouts"], **LOGGED))
    assert all(entries and rewards.any() for entries, rewards in (each for each in seen if isinstance(each, tuple)))
    seen.clear()
    before = torch.get_float32_matmul_precision()
    with pytest.warns(UserWarning, match="SetsUp.on_step_end changed torch.set_float32_matmul_precision: high became"):
        train(make(plugins=[PATH + "SetsUp", PATH + "Steps"], output_dir=tmp_path / "set"))
    torch.set_float32_matmul_precision(before)
    assert seen == ["high", "high", 1, "high", 2]
    with pytest.raises(ConfigError, match="has on_rollouts_scored, but this method samples no rollouts"):
        train(make(plugins=[PATH + "Rollouts"], output_dir=tmp_path / "elsewhere"))


def test_weights_that_are_not_finite_are_not_saved(make, out):
    said = "Weights are NaN or infinite after the last step .first.*they were so in base_model"
    with pytest.raises(NonFiniteLossError, match=said):
        train(make(plugins=[PATH + "Ruins"]))
    assert json.loads((out / "ebft_final.json").read_text())["step"] is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (PATH + "Neither", "must be a class: a transformers.TrainerCallback, or one with a method on_rollouts_scored"),
        (PATH + "function", "must be a class"),
        (PATH + "Absent", "has no function 'Absent'"),
        ("no_such_module.Class", "the module was not found"),
        (
            PATH + "OtherArguments",
            r"OtherArguments.on_rollouts_scored cannot be called as on_rollouts_scored.self, rol",
        ),
        (PATH + "NeedsArguments", "cannot be called as NeedsArguments..: missing a required argument: 'folder'"),
        (
            PATH + "Positional",
            r"Positional.on_step_end cannot be called as .*'model'. Define it as on_step_end.self, a",
        ),
        (PATH + "LogsOnly", "LogsOnly.on_log cannot be called as on_log.*unexpected keyword argument"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(make, name, message):
    check_plugins([PATH + name for name in ("Accepted", "Both", "Steps", "Rollouts")])
    with pytest.raises(ConfigError, match=message):
        check_runnable(make(base_model="some/model", plugins=[name]))


AUTO = {"auto_resume_from_checkpoints": True}
# A learning rate that makes every evaluation after the first one worse.
WORSE = {"learning_rate": 1.0, "lr_scheduler": "constant", "max_steps": 20, "val_set_size": 4, "max_grad_norm": 100.0}
WORSE |= {"eval_steps": 2, "early_stopping_patience": 2}


def steps(result):
    return result.trainer.state.global_step


@pytest.mark.slow
def test_evaluations_that_do_not_improve_end_a_run(make, out):
    keys = {**WORSE, "save_steps": 20}
    with pytest.warns(UserWarning, match="The best evaluation was that of step .* the result is not the best model"):
        result = train(make(**keys))
    losses = [entry["eval_loss"] for entry in result.trainer.state.log_history if "eval_loss" in entry]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 and steps(result) == 2 * len(losses) < 20
    assert (out / f"checkpoint-{steps(result)}").is_dir()
    with pytest.warns(UserWarning, match="Training is already complete.*Increase early_stopping_patience"):
        train(make(**keys, **AUTO))
    assert steps(train(make(**{**keys, "early_stopping_patience": 3}, **AUTO))) >= 2 + steps(result)


def test_the_count_of_evaluations_continues_in_a_resumed_run(make, out, tmp_path):
    keys = {**WORSE, "save_steps": 2}
    unbroken = steps(result := train(make(**keys)))
    best = result.trainer.state.best_global_step
    assert best < unbroken and Path(result.trainer.state.best_model_checkpoint) == out / f"checkpoint-{best}"
    assert_equal(*(load_file(out / part / "model.safetensors") for part in ("", f"checkpoint-{best}")))
    resume = {"output_dir": tmp_path / "b", "resume_from_checkpoint": out / f"checkpoint-{unbroken - 2}"}
    assert steps(train(make(**keys, **resume))) == unbroken < 20


def test_losses_above_a_threshold_end_a_run(make, out, tmp_path):
    keys = {"max_steps": 6, "save_steps": 3, "loss_watchdog_threshold": 1.0, "loss_watchdog_patience": 4}
    assert steps(train(make(**keys))) == 4 and (out / "checkpoint-4").is_dir()
    resume = {"output_dir": tmp_path / "b", "resume_from_checkpoint": out / "checkpoint-3"}
    assert steps(train(make(**keys, **resume))) == 4  # the count continues
    with pytest.warns(UserWarning, match="already complete.*Increase loss_watchdog_threshold or loss_watchdog_pat"):
        assert steps(train(make(**keys, **AUTO))) == 4
    keys["loss_watchdog_patience"] = 5
    assert steps(train(make(**keys, **AUTO))) == 5
    keys["loss_watchdog_threshold"] = 1000.0
    assert steps(train(make(**keys, **AUTO))) == 6
    keys = {"max_steps": 4, "loss_watchdog_threshold": 1.0, "loss_watchdog_patience": None}
    assert steps(train(make(**keys, output_dir=tmp_path / "c"))) == 3
