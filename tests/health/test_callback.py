"""Runs that fail are recognised, once; others are silent."""

import pytest
from transformers import AutoModelForCausalLM

from ebft import HealthCallback
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
