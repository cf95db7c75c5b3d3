"""The console line, which the main process prints."""

import pytest

from ebft.monitor.metrics import format_logs

LOGS = {
    "loss": 0.25, "grad_norm": 1.5, "ebft/alignment": 0.412, "ebft/diversity": 0.023, "ebft/cfm_loss": 4.231,
    "ebft/mean_reward": 0.389, "throughput/generated_tokens_per_s": 1234.4,
}  # fmt: skip
LINE = """ebft reward | align +0.412 ^ | divers +0.023 v | cfm 4.231 v | reward +0.389 ^ | step 10/100
    | loss 0.2500 | grad_norm 1.5000 | 1,234 tok/s"""
SEVERAL = {"loss": 0.0, "reward": 0.139, "rewards/exact/mean": 0.094, "rewards/feature_matching/mean": 0.09}
OF_SEVERAL = "ebft reward | reward +0.090 ^ | total reward +0.139 ^ | exact +0.094 | step 2/10 | loss 0.0000"
GRPO = {"loss": 0.0, "reward": 0.094, "rewards/exact/mean": 0.094}
HELD_OUT = {"eval_loss": -0.0, "eval_reward": 0.5, "eval_rewards/exact/mean": 0.5}
EVALUATED = {"eval_ce_loss": 1.0, "eval_alignment": 0.3, "eval_cfm_loss": 0.5}


@pytest.mark.parametrize(("logs", "steps", "line"), [
    (EVALUATED, (3, 9), "held out | eval_align +0.300 ^ | eval_cfm 0.500 v | step 3/9 | ce_loss 1.0000"),
    (LOGS, (10, 100), LINE), ({"ebft/diversity": -6e-10}, (1, 0), "ebft reward | divers +0.000 v | step 1"),
    ({**SEVERAL, "ebft/mean_reward": 0.09}, (2, 10), OF_SEVERAL),
    (GRPO, (2, 10), "reward | total reward +0.094 ^ | exact +0.094 | step 2/10 | loss 0.0000"),
    (HELD_OUT, (2, 10), "held out | total reward +0.500 ^ | exact +0.500 | step 2/10"),
])  # fmt: skip
def test_line(logs, steps, line):
    assert format_logs(logs, *steps) == line
