"""Runs that fail are recognised, once; others are silent."""

import json
import warnings

import pytest
from transformers import AutoModelForCausalLM

from ebft import HealthCallback, train
from ebft.errors import NonFiniteLossError
from ebft.run_files import HEALTH
from tests.golden.runs import write_inputs
from tests.monitor.sft_run import plain_trainer


def run(name, folder, **keys):
    """Train the golden run `name` with other keys; returns its result, its warnings and the lines of health.jsonl."""
    from ebft.run.config.schema import load_config

    path = write_inputs(name, folder)
    overrides = {"max_steps": 24, "eval_steps": 1000, "warmup_steps": 0, "lr_scheduler": "constant", **keys}
    config = load_config(path, [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    with warnings.catch_warnings(record=True, action="always") as caught:
        result = train(config)
    return result, [str(warning.message) for warning in caught], lines(folder / "out")


def lines(folder):
    path = folder / HEALTH
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@pytest.mark.parametrize("recovers", [False, True])
def test_conditions_that_still_hold_at_the_end(tiny_llama_dir, tmp_path, recovers):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    trainer = plain_trainer(tmp_path, model, max_steps=1)
    callback, state = HealthCallback(), trainer.state
    trainer.add_callback(callback)
    trainer.train()
    losses = [2.0] * 20 + [9.0] * 5 + [2.0 if recovers else 9.0] * 20
    state = trainer.state
    state.log_history = []
    callback.on_train_begin(trainer.args, state, trainer.control)
    with pytest.warns(UserWarning, match="cross-entropy diverges"):
        for state.global_step, loss in enumerate(losses, start=1):
            state.log_history.append({"step": state.global_step, "loss": loss})
            callback.on_log(trainer.args, state, trainer.control, {"loss": loss})
    state.log_history += [{"step": 45, "eval_loss": 3.0}, {"step": 45, "train_runtime": 1.0, "train_loss": 2.0}]
    assert callback.unresolved(trainer.args, state) == ([] if recovers else ["cross-entropy diverges"])


def test_a_learning_rate_that_ends_training(tmp_path):
    with pytest.raises(NonFiniteLossError):
        run("sft", tmp_path, learning_rate=10, adapter=None)
    *diverged, ended = lines(tmp_path / "out")  # the values may be NaN before the loss has been high for long enough
    assert ended["name"] == "non-finite values" and "nan" in ended["message"]
    assert all(line["name"] == "cross-entropy diverges" and line["step"] <= ended["step"] for line in diverged)
