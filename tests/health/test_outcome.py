from random import Random

from ebft import training_outcome


def training(name, levels, spread=0.1, seed=0):
    random = Random(seed)
    return [{"step": i + 1, "loss": 0.0, name: level + random.gauss(0, spread)} for i, level in enumerate(levels)]


def evaluations(name, values):
    return [{"step": 10 * i, name: value, "eval_ce_loss": 2.0} for i, value in enumerate(values)]


def test_a_change_beyond_its_error():
    text = training_outcome(training("ebft/ce_loss", [3 - 0.02 * i for i in range(50)]))
    assert "the model learned: ebft/ce_loss improved" in text and "First and last fifth" in text
    assert "±" in text and "ebft/ce_loss 2.874" in text


def test_the_wrong_direction():
    text = training_outcome(training("ebft/alignment", [1 - 0.02 * i for i in range(50)]))
    assert "the model did not learn: ebft/alignment became worse" in text


def test_noise_is_no_change():
    for seed in range(10):
        text = training_outcome(training("reward", [0.5] * 50, spread=0.3, seed=seed))
        assert "no change larger than its error" in text


def test_the_loss_counts_in_sft_only():
    falling = [{"step": i, "loss": 3 - 0.1 * i} for i in range(20)]
    assert "loss improved" in training_outcome(falling)
    with_reward = [entry | {"reward": 0.5} for entry in falling]
    assert "no change larger than its error" in training_outcome(with_reward)


def test_the_reward_is_not_repeated_if_features_are_its_only_part():
    log = [entry | {"reward": entry["ebft/mean_reward"]} for entry in training("ebft/mean_reward", range(20))]
    assert "reward" not in training_outcome([entry | {"ebft/alignment": 1.0} for entry in log])


def test_evaluations_come_first():
    log = evaluations("eval_cfm_loss", [0.5, 0.4, 0.31, 0.2]) + training("ebft/cfm_loss", [0.5] * 50)
    text = training_outcome(log)
    assert "learned: eval_cfm_loss improved" in text and "eval_cfm_loss 0.5 -> 0.2 (-0.3 ± 0.01)" in text
    assert "fifth" not in text


def test_an_error_that_two_evaluations_do_not_show():
    log = evaluations("eval_cfm_loss", [0.5, 0.4])
    assert "unknown, since the standard error" in training_outcome(log) and "ebft evaluate" in training_outcome(log)
    text = training_outcome(log + training("ebft/cfm_loss", [0.5] * 50))
    assert "no change larger than its error" in text and "eval_cfm_loss 0.5 -> 0.4 (-0.1)" in text


def test_a_short_log_and_values_that_are_no_numbers():
    assert "unknown" in training_outcome([]) and "test_datasets" in training_outcome([])
    log = training("reward", [0.5] * 7) + [{"step": 8, "reward": float("nan")}, {"step": 9, "reward": None}]
    assert training_outcome(log).startswith("Outcome: unknown")
