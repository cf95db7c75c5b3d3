from random import Random

import pytest

from ebft import training_outcome


def training(name, levels, spread=0.1, seed=0):
    random = Random(seed)
    return [{"step": i + 1, "loss": 0.0, name: level + random.gauss(0, spread)} for i, level in enumerate(levels)]


def evaluations(name, values):
    return [{"step": 10 * i, name: value, "eval_ce_loss": 2.0} for i, value in enumerate(values)]


def test_the_direction_of_a_change_beyond_its_error_and_noise():
    text = training_outcome(training("ebft/ce_loss", [3 - 0.02 * i for i in range(50)]))
    assert "the model learned: ebft/ce_loss improved" in text and "First and last fifth" in text
    assert "±" in text and "ebft/ce_loss 2.874" in text
    text = training_outcome(training("ebft/alignment", [1 - 0.02 * i for i in range(50)]))
    assert "the model did not learn: ebft/alignment became worse" in text
    for seed in range(10):
        text = training_outcome(training("reward", [0.5] * 50, spread=0.3, seed=seed))
        assert "no change larger than its error" in text


def test_preference_methods_are_judged_by_their_margins():
    rising = training("rewards/margins", [0.02 * i for i in range(50)])
    text = training_outcome(rising, evaluate=None)
    assert "the model learned: rewards/margins improved" in text and "ebft evaluate" not in text
    held_out = [{"step": 10 * i, "eval_rewards/margins": value} for i, value in enumerate([0.0, 0.5])]
    text = training_outcome(held_out, evaluate=None)
    assert "eval_rewards/margins 0 -> 0.5" in text and "ebft evaluate" not in text


def test_the_loss_counts_in_sft_only():
    falling = [{"step": i, "loss": 3 - 0.1 * i} for i in range(20)]
    assert "loss improved" in training_outcome(falling)
    with_reward = [entry | {"reward": 0.5} for entry in falling]
    assert "no change larger than its error" in training_outcome(with_reward)


def test_the_reward_is_not_repeated_if_features_are_its_only_part():
    log = [entry | {"reward": entry["ebft/mean_reward"]} for entry in training("ebft/mean_reward", range(20))]
    assert "reward" not in training_outcome([entry | {"ebft/alignment": 1.0} for entry in log])


def test_evaluations_come_first_with_their_steps_and_the_command_that_compares_the_models():
    log = evaluations("eval_cfm_loss", [0.5, 0.4, 0.31, 0.2]) + training("ebft/cfm_loss", [0.5] * 50)
    text = training_outcome(log)
    assert "learned: eval_cfm_loss improved" in text and "eval_cfm_loss 0.5 -> 0.2 (-0.3 ± 0.0084, counts from " in text
    assert "fifth" not in text
    log = evaluations("eval_cfm_loss", [0.5, 0.45, 0.4]) + [{"step": 33, "train_loss": 1.0}]
    text = training_outcome(log, "ebft evaluate 'my run.yaml'")
    assert "First and last evaluation (steps 0 and 20):\n  eval_cfm_loss" in text
    assert text.endswith("confidence intervals:\n  ebft evaluate 'my run.yaml'")


def test_unresolved_health_conditions_are_said_first():
    for log in ([], evaluations("eval_cfm_loss", [0.5, 0.4, 0.31, 0.2])):
        text = training_outcome(log, unresolved=["no signal", "low alignment"])
        assert "\nReported in health.jsonl and still so at the end: no signal, low alignment." in text
        assert "health.jsonl" not in training_outcome(log)


def test_an_error_that_two_evaluations_do_not_show():
    log = evaluations("eval_cfm_loss", [0.5, 0.4])
    assert "unknown, since the standard error" in training_outcome(log) and "ebft evaluate" in training_outcome(log)
    text = training_outcome(log + training("ebft/cfm_loss", [0.5] * 50))
    assert "no change larger than its error" in text and "eval_cfm_loss 0.5 -> 0.4 (-0.1)" in text


def test_a_short_log_and_values_that_are_no_numbers():
    assert "unknown" in training_outcome([]) and "test_datasets" in training_outcome([])
    log = training("reward", [0.5] * 7) + [{"step": 8, "reward": float("nan")}, {"step": 9, "reward": None}]
    assert training_outcome(log).startswith("Outcome: unknown")


def test_the_first_evaluation_after_training_steps_is_not_the_base_model():
    log = evaluations("eval_cfm_loss", [0.5, 0.45, 0.4, 0.35, 0.3])
    assert "base model" not in training_outcome(log)
    text = training_outcome(log[1:])
    assert "The first evaluation already followed 10 steps of training, so it is not one of the base model" in text
    assert "eval_on_start: true" in text
    assert "followed 1 step of" in training_outcome([entry | {"step": entry["step"] // 10} for entry in log[1:]])


def test_an_unknown_outcome_advises_what_is_not_set_yet():
    command = "ebft evaluate 'my run.yaml'"
    for log, count in ((evaluations("eval_cfm_loss", [0.5]), "one"), ([], "no")):
        text = training_outcome(log, command, has_held_out=True)
        assert text.startswith(
            f"Outcome: unknown. The log has {count} evaluation and fewer than 8 entries of training."
        )
        assert "val_set_size" not in text and "a smaller eval_steps" in text and text.endswith(command)
    text = training_outcome([], command)
    assert "Set test_datasets or val_set_size with eval_steps" in text and command not in text


def evaluated(**metrics):
    return [{"step": i, **dict(zip(metrics, values))} for i, values in enumerate(zip(*metrics.values()))]


def verdicts(logs):
    return sum("no change larger than its error" not in training_outcome(log) for log in logs)


@pytest.mark.parametrize("count", [4, 5, 7, 12, 40])
@pytest.mark.parametrize("names", [["eval_loss"], ["eval_cfm_loss", "eval_alignment", "eval_reward", "eval_ce_loss"]])
def test_noise_of_evaluations_rarely_gives_a_verdict(count, names):
    random = Random(count)
    draw = lambda: {name: [random.gauss(2, 0.1) for _ in range(count)] for name in names}
    assert verdicts(evaluated(**draw()) for _ in range(400)) < 0.05 * 400


def test_noise_of_training_logs_rarely_gives_a_verdict():
    random = Random(0)
    entry = lambda i: {"step": i, "ebft/ce_loss": random.gauss(2, 1), "ebft/alignment": random.random()}
    assert verdicts([entry(i) for i in range(8)] for _ in range(400)) < 0.05 * 400


def test_a_step_and_a_trend_are_not_noise():
    slow = [3 * 0.9**i for i in range(30)]
    for values in ([5, 3, 2.9, 2.85, 2.84, 2.83], [5, 4.1, 3, 2], [3, 2.5, 2.2, 2.0, 1.9, 1.85], slow):
        assert "the model learned: eval_loss improved" in training_outcome(evaluated(eval_loss=values)), values
    assert "did not learn: eval_loss became worse" in training_outcome(evaluated(eval_loss=[2, 9, 9.1, 9]))


def test_a_model_did_not_learn_if_a_held_out_metric_is_far_worse():
    falling = [{"step": i, "loss": 3 - 0.1 * i} for i in range(20)]
    text = training_outcome(evaluated(eval_loss=[3, 9]) + falling)
    assert "the model learned" not in text and "loss improved, but eval_loss moved in the wrong direction" in text
    assert "unknown with fewer than four evaluations" in text
    both = {"eval_cfm_loss": [3, 2, 1, 0.1], "eval_ce_loss": [3, 9, 5, 9]}
    text = training_outcome(evaluated(**both))
    assert "the model learned" not in text and "eval_ce_loss" in text.partition(".")[0]


def test_two_different_values_show_no_error():
    text = training_outcome(evaluated(eval_reward=[0, 1, 1, 1]))
    assert "unknown, since the standard error" in text and "±" not in text
