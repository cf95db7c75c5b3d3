"""Runs that fail are recognised, once; others are silent."""

import json
import warnings
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from ebft import HealthCallback
from ebft.errors import NonFiniteLossError
from ebft.run_files import HEALTH
from tests.monitor.sft_run import plain_trainer


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


@pytest.mark.slow
def test_a_resumed_run_says_nothing_twice(tiny_llama_dir, tmp_path):
    def trained(steps, checkpoint=None):
        model, keys = AutoModelForCausalLM.from_pretrained(tiny_llama_dir), {"save_strategy": "steps", "save_steps": 4}
        keys |= {"learning_rate": 1.0, "lr_scheduler_type": "constant", "max_steps": steps}
        trainer = plain_trainer(tmp_path, model, **keys)
        trainer.add_callback(callback := HealthCallback())
        with warnings.catch_warnings(action="ignore"):
            trainer.train(resume_from_checkpoint=checkpoint)
        return callback, [json.loads(line) for line in (tmp_path / HEALTH).read_text(encoding="utf-8").splitlines()]

    callback, first = trained(12)
    assert "cross-entropy diverges" in callback.reported
    resumed, lines = trained(14, str(tmp_path / "checkpoint-12"))
    assert lines == first and "cross-entropy diverges" in resumed.reported
    assert trained(12, str(tmp_path / "checkpoint-4"))[1][len(first)]["step"] == first[0]["step"]
    args, state = SimpleNamespace(output_dir=tmp_path), SimpleNamespace(is_world_process_zero=True, global_step=14)
    resumed.failed(NonFiniteLossError("The loss is nan"), args, state)
    last = json.loads((tmp_path / HEALTH).read_text(encoding="utf-8").splitlines()[-1])
    assert (last["name"], last["step"], last["message"]) == ("non-finite values", 15, "The loss is nan")
