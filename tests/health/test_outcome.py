import math
from random import Random

import numpy as np
import pytest

from ebft import training_outcome


def training(name, levels, spread=0.1, seed=0):
    random = Random(seed)
    return [{"step": i + 1, "loss": 0.0, name: level + random.gauss(0, spread)} for i, level in enumerate(levels)]


def evaluations(name, values):
    return [{"step": 10 * i, name: value, "eval_ce_loss": 2.0} for i, value in enumerate(values)]


def falling(**others):
    return [{"step": i, "loss": 3 - 0.1 * i, **others} for i in range(20)]


def evaluated(**metrics):
    return [{"step": i, **dict(zip(metrics, values))} for i, values in enumerate(zip(*metrics.values()))]


NO_CHANGE, TOO_FEW = "no change larger than the noise", "Outcome: too few evaluations to tell."
COMMAND = "ebft evaluate 'my run.yaml'"
CFM = evaluations("eval_cfm_loss", [0.5, 0.45, 0.4, 0.35, 0.3])
TWO = evaluations("eval_cfm_loss", [0.5, 0.4])
FOUR = [{"step": i, "eval_loss": value} for i, value in enumerate([5, 4.7, 3.46, 3.3])]
KNOWN = evaluations("eval_cfm_loss", [0.5, 0.4, 0.31, 0.2])
STEADY = training("ebft/cfm_loss", [0.5] * 50)
LEARNED = training("ebft/ce_loss", [3 - 0.02 * i for i in range(50)])
UNLEARNED = training("ebft/alignment", [1 - 0.02 * i for i in range(50)])
PREFERRED = training("rewards/margins", [0.02 * i for i in range(50)])
MEAN = [entry | {"reward": entry["ebft/mean_reward"]} for entry in training("ebft/mean_reward", range(20))]
MIXED = [{"step": i, "ebft/alignment": 1 - i / 50, "ebft/ce_loss": 2 - i / 50} for i in range(50)]
FIRST = "The first evaluation already followed"
UNKNOWN = "Outcome: unknown. The log has {} evaluation and fewer than 8 entries of training."


def case(log, *present, absent="(nothing)", **options):
    return log, options, present, absent


@pytest.mark.parametrize(("log", "options", "present", "absent"), [
    case(LEARNED, "the model learned: ebft/ce_loss improved", "First and last tenth", "±", "ebft/ce_loss 2.924"),
    case(UNLEARNED, "did not learn: ebft/alignment became worse", "and still so at the end: a, b", unresolved="ab"),
    case(PREFERRED, "the model learned: rewards/margins improved", absent="ebft evaluate", evaluate=None),
    case(evaluated(eval_ce_loss=[3, 2, 1, None]), "eval_ce_loss is not finite at the end", absent="learned"),
    # the loss counts in SFT only
    case(falling(), "loss improved"), case(falling(reward=0.5), NO_CHANGE),
    # the reward is not repeated if features are its only part
    case([entry | {"ebft/alignment": 1.0} for entry in MEAN], absent="reward"),
    # evaluations come first, with their steps and the command that compares the models
    case(KNOWN + STEADY, "learned: eval_cfm_loss improved", "cfm_loss 0.5 -> 0.2 (-0.3 ± 0.0084, significant above "),
    case(CFM[:3] + [{"step": 33, "train_loss": 1.0}], f"confidence intervals:\n  {COMMAND}", evaluate=COMMAND),
    # an error that two evaluations, or two values, do not show
    case(TWO, TOO_FEW, "(a smaller eval_steps, or larger evals_per_epoch), or train", "ebft evaluate"),
    case(evaluated(eval_reward=[0, 1, 1, 1]), TOO_FEW, absent="±"),
    # a change that would count with more evaluations
    case(FOUR, TOO_FEW, "3.3 (-1.7 ± 0.24, significant above 2.3)", "a smaller eval_steps", absent="unknown"),
    # the first evaluation is that of the base model, unless it follows steps of training
    case(CFM, absent="base model"),
    case(CFM[1:], f"{FIRST} 10 steps of training, so it is not one of the base model", "eval_on_start: true"),
    # an unknown outcome advises what is not set yet
    case(CFM[:1], UNKNOWN.format("one"), "smaller eval_steps", COMMAND, has_held_out=True, evaluate=COMMAND),
    case([], UNKNOWN.format("no"), "or eval_on_start: true), or", COMMAND, has_held_out=True, evaluate=COMMAND),
    case([], "Set test_datasets or val_set_size with eval_steps", absent=COMMAND, evaluate=COMMAND),
    # a model did not learn if a held-out metric is far worse
    case(evaluated(eval_loss=[3, 9]) + falling(), "loss improved, but eval_loss moved in the wrong direction"),
    case(evaluated(eval_cfm_loss=[3, 2, 1, 0.1], eval_ce_loss=[3, 9, 5, 9]), "improved, but eval_ce_loss moved in"),
    # whitened rewards of training give no verdict
    case(MIXED, "improved, but ebft/alignment became worse"),
    case(MIXED, "the model learned: ebft/ce_loss improved", absent="alignment", use_whitening=True),
    case(UNLEARNED, "whitened rewards of training cannot be compared", use_whitening=True),
])  # fmt: skip
def test_what_is_said(log, options, present, absent):
    text = training_outcome(log, **options)
    assert text.startswith("Outcome: ") and all(part in text for part in present) and absent not in text, text
    assert options.get("evaluate") != COMMAND or text.endswith(COMMAND) == (absent != COMMAND)


def verdicts(logs):
    found = [training_outcome(log).split("\n")[0] for log in logs]
    return sum("improved" in verdict or "worse" in verdict for verdict in found)


@pytest.mark.parametrize("count", [4, 5, 7, 12, 40])
@pytest.mark.parametrize("names", [["eval_loss"], ["eval_cfm_loss", "eval_alignment", "eval_reward", "eval_ce_loss"]])
def test_noise_of_evaluations_rarely_gives_a_verdict(count, names):
    random = Random(count)
    draw = lambda: {name: [random.gauss(2, 0.1) for _ in range(count)] for name in names}
    assert verdicts(evaluated(**draw()) for _ in range(200)) < 0.05 * 200


@pytest.mark.parametrize("count", [8, 50, 300])
@pytest.mark.parametrize("correlation", [0, 0.8, 0.95, *(pytest.param(r, marks=pytest.mark.slow) for r in (0.5, 0.9))])
def test_noise_of_training_logs_rarely_gives_a_verdict(count, correlation):
    noise = np.random.default_rng(count).standard_normal((2, 150, count))
    for time in range(1, count):
        noise[..., time] = math.sqrt(1 - correlation**2) * noise[..., time] + correlation * noise[..., time - 1]
    for names in (["loss"], ["ebft/ce_loss", "ebft/alignment"]):
        assert verdicts(evaluated(**dict(zip(names, series.tolist()))) for series in noise.swapaxes(0, 1)) < 0.05 * 150


def test_a_step_and_a_trend_are_not_noise():
    slow = [3 * 0.9**i for i in range(30)]
    for values in ([5, 3, 2.9, 2.85, 2.84, 2.83], [5, 4.1, 3, 2], [3, 2.5, 2.2, 2.0, 1.9, 1.85], slow):
        assert "the model learned: eval_loss improved" in training_outcome(evaluated(eval_loss=values)), values
    assert "did not learn: eval_loss became worse" in training_outcome(evaluated(eval_loss=[2, 9, 9.1, 9]))
