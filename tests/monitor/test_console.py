"""The console line, and that it comes from the main process through the trainer's own log call."""

from types import SimpleNamespace

import pytest
import torch

from ebft.monitor import ConsoleMetrics
from ebft.monitor.metrics import format_logs

LOGS = {
    "loss": 0.25,
    "grad_norm": 1.5,
    "ebft/alignment": 0.412,
    "ebft/diversity": 0.023,
    "ebft/cfm_loss": 4.231,
    "ebft/mean_reward": 0.389,
    "throughput/generated_tokens_per_s": 1234.4,
}


def test_line():
    assert format_logs(LOGS, 10, 100) == (
        "ebft reward | align +0.412 ^ | divers +0.023 v | cfm 4.231 v | reward +0.389 ^"
        " | step 10/100 | loss 0.2500 | grad_norm 1.5000 | 1,234 tok/s"
    )


def test_line_without_ebft_terms():
    assert format_logs({"loss": 2.0}, 3, 0) == "loss | step 3 | loss 2.0000"
    assert format_logs({"eval_loss": 2.0}, 3, 9) == "held out | step 3/9 | loss 2.0000"


def test_line_of_evaluation():
    logs = {"eval_ce_loss": 1.0, "eval_alignment": 0.3, "eval_cfm_loss": 0.5}
    assert format_logs(logs, 3, 9) == "held out | align +0.300 ^ | cfm 0.500 v | step 3/9 | ce_loss 1.0000"


def test_rounding_leaves_no_negative_zero():
    assert format_logs({"ebft/diversity": -6e-10}, 1, 0) == "ebft reward | divers +0.000 v | step 1"


def test_other_logs_give_no_line():
    assert format_logs({"train_runtime": 3.0}, 3, 9) is None


@pytest.mark.parametrize(("main", "lines"), [(True, 1), (False, 0)])
def test_only_the_main_process_prints(main, lines, capsys):
    state = SimpleNamespace(is_world_process_zero=main, global_step=1, max_steps=2)
    ConsoleMetrics().on_log(None, state, None, logs=LOGS)
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_trainer_calls_it(tmp_path, capsys):
    from transformers import Trainer, TrainingArguments

    class Regression(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x, labels):
            return {"loss": (self.layer(x) - labels).square().mean()}

    args = TrainingArguments(tmp_path, max_steps=2, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
    rows = [{"x": [1.0], "labels": [2.0]}] * 4
    Trainer(Regression(), args, train_dataset=rows, callbacks=[ConsoleMetrics()]).train()
    out = capsys.readouterr().out
    assert "loss | step 1/2 | loss" in out and "loss | step 2/2 | loss" in out


def test_several_rewards_are_told_apart():
    logs = {"loss": 0.0, "reward": 0.139, "rewards/exact/mean": 0.094, "rewards/feature_matching/mean": 0.09}
    line = format_logs({**logs, "ebft/mean_reward": 0.09}, 2, 10)
    assert line == "ebft reward | reward +0.090 ^ | total reward +0.139 ^ | exact +0.094 | step 2/10 | loss 0.0000"
    grpo = {"loss": 0.0, "reward": 0.094, "rewards/exact/mean": 0.094}
    assert format_logs(grpo, 2, 10).startswith("reward | total reward +0.094 ^ | exact +0.094")
    held_out = {"eval_loss": -0.0, "eval_reward": 0.5, "eval_rewards/exact/mean": 0.5}
    assert format_logs(held_out, 2, 10) == "held out | total reward +0.500 ^ | exact +0.500 | step 2/10"
