"""Two processes train reward models as one does, with the same batches, and evaluate every held-out row once."""

import pytest

from tests.run.crash import config_of, result, run_processes, write_inputs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["reward_model", "process_reward_model"])
def test_two_processes_log_what_one_does(method, tmp_path):
    write_inputs(tmp_path)
    # Two whole batches of the five training rows; of the three held-out rows, one is repeated.
    steps = {"max_steps": 2, "eval_steps": 2, "logging_steps": 1, "val_set_size": 3, "gradient_accumulation_steps": 1}
    keys = {**steps, "learning_rate": 1e-3, "lora_dropout": 0.0, "eval_batch_size": 1}
    logs = []
    for count in (1, 2):
        out = tmp_path / str(count)
        config = config_of(method, tmp_path, out, micro_batch_size=2 // count, **keys)
        ended = run_processes(config, count)
        assert {process.code for process in ended} == {0}, ended[0].output
        logs.append([entry for entry in result(out)[1] if "train_loss" not in entry])
    assert len(logs[0]) == len(logs[1]) and any("eval_accuracy" in entry for entry in logs[0])
    for one, two in zip(*logs):
        for numbers in (one, two):
            numbers.pop("budget/flops", None)  # batches of other sizes have other padding
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
