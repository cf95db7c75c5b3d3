"""What profiles a run, and ends it before its last step: evaluations that do not improve, losses above a threshold."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from ebft import train
from ebft.run import callbacks, output
from tests.run.conftest import STRIDED, assert_equal

AUTO = {"auto_resume_from_checkpoints": True}
# A learning rate that makes every evaluation after the first one worse.
WORSE = {"learning_rate": 1.0, "lr_scheduler": "constant", "max_steps": 20, "val_set_size": 4, "max_grad_norm": 100.0}
WORSE |= {"eval_steps": 2, "early_stopping_patience": 2}


def steps(result):
    return result.trainer.state.global_step


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


def test_profiled_steps(make, out):
    assert [*callbacks.profiled_steps(2, 3)] == [4, 5] and [*callbacks.profiled_steps(1, None)] == [1]
    with pytest.warns(UserWarning, match="profiler_steps: 5 is not profiled: training runs from step 1 to step 2"):
        train(make(profiler_steps=[2, 5]))
    [path] = (out / "profiler").iterdir()
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert path.name == "rank0.step2.pt.trace.json" and {"aten::mm", "[memory]"} <= names


def test_a_tracker_that_fails_later_is_a_warning(make, out, monkeypatch):
    failed = Mock(side_effect=OSError("disk quota exceeded"))
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", failed)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.close", failed)
    with pytest.warns(UserWarning, match="The tracker TensorBoard failed.*: disk quota exceeded"):
        train(make(max_steps=2, use_tensorboard=True))
    assert (out / "model.safetensors").is_file() and failed.call_count > 1


@pytest.mark.parametrize("event", ["on_train_end", "on_step_end"])
def test_an_error_after_the_last_update_does_not_lose_the_model(make, out, event):
    with pytest.raises(OSError, match="full"):
        train(make(**STRIDED, max_steps=2, save_strategy="no", plugins=[f"tests.run.test_callbacks.Failing{event}"]))
    assert output.final_step(out) == 2 and json.loads((out / "run.json").read_text())["state"] == "failed"


def failing(event):
    def fail(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise OSError("full")

    return type(f"Failing{event}", (TrainerCallback,), {event: fail})


Failingon_train_end, Failingon_step_end = map(failing, ("on_train_end", "on_step_end"))
