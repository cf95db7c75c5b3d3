"""Every row of the table has a log that it recognises and a similar one that it does not."""

import json
import math
import re
from pathlib import Path
from random import Random

import pytest

from ebft.health import callback, rules
from ebft.run.config.reference import option_groups

ROOT = Path(__file__).parents[2]
NAN = float("nan")


def noisy(level, spread=0.0, count=40, seed=0, step=0.0):
    """`count` values around `level`, which moves by `step`."""
    random = Random(seed)
    return [level + step * i + random.gauss(0, spread) for i in range(count)]


def entries(**metrics):
    """Log entries of steps 1, 2, ... with these values; `__` in a name is a slash. None: the metric is not logged."""
    length = max(map(len, metrics.values()))
    return [
        {name.replace("__", "/"): values[i] for name, values in metrics.items() if values[i] is not None}
        for i in range(length)
    ]


def seen(log_entries, **setting):
    """The sightings of all conditions in a log, by name, each at its first step."""
    log, found = rules.Log(**{"samples": 4, "whitened": False, **setting}), {}
    for step, entry in enumerate(log_entries, start=1):
        log.add(entry.get("step", step), entry)
        for condition in callback.CONDITIONS:
            if condition.name not in found and (sighting := condition.rule(log)) is not None:
                found[condition.name] = sighting
    return found


lengths = noisy(20, 2, 10) + [20 + 1.2 * i + 3 * (-1) ** i for i in range(35)]
rewards_of_length = [0.1 * value for value in lengths]
unrelated_rewards = [0.03 * i + 0.1 * (-1) ** (i // 2) for i in range(45)]
evaluated = lambda *values: [None] * 19 + [value for pair in zip(values, [None] * len(values)) for value in pair]
falling_loss = noisy(2, 0.01, 27, step=-0.02)

calm = noisy(1.79, 0.02, 10)
sure = noisy(2, 0.1, 10)
no_rewards = {"frac_reward_zero_std": [1.0] * 25, "grad_norm": [0.0] * 25}
some_rewards = {"frac_reward_zero_std": [1.0, 1.0, 1.0, 0.5] * 10, "grad_norm": [0.0, 0.0, 0.0, 0.3] * 10}
with_loss = lambda *values: {"eval_ce_loss": evaluated(*values), "loss": falling_loss}
overfits, does_not = with_loss(2.0, 2.05, 2.1, 2.2), with_loss(2.0, 1.95, 2.0, 1.99)
DRIFT, RATIO = "sampling__sampling_logp_difference__mean", "sampling__importance_sampling_ratio__min"
still_near = {DRIFT: noisy(0.05, 0.01), RATIO: [0.005] * 40}
as_long = {"completions__mean_length": lengths}
RISES = (noisy(2, 0.7, 30) + noisy(2.2, 0.7, 300), noisy(0.2, 0.1, 30) + noisy(0.25, 0.1, 300))  # as batches differ
ONE_SPIKE = noisy(1, 0.1, 20) + [200.0] + noisy(1, 0.1, 20)
TWO_SPIKES = noisy(6, 0.1, 6) + (noisy(2, 0.2, 9) + [6.0]) * 2 + noisy(2, 0.2)
PREFERRED = noisy(-0.6, 0.05, 40)


def of(metric, *logs):
    """A log with a condition and a near miss, of one metric."""
    return tuple(entries(**{metric: values}) for values in logs)


# name of a condition -> (a log with it, a near miss)
CASES = {
    "non-finite values": (entries(loss=[2.0, 2.0, NAN]), entries(loss=noisy(2, 0.1), rewards__sparse__mean=[NAN] * 40)),
    # quickstart: 1.79 to 1.84
    "samples become identical": of("ebft__diversity", calm + noisy(1.97, 0.005, 20), calm + noisy(1.85, 0.02, 20)),
    "entropy collapse": of("entropy", sure + noisy(0.1, 0.02, 20), sure + noisy(0.5, 0.1, 20)),
    "diversity term dominates": of("ebft__mean_reward", noisy(-1, 0.05), noisy(-1.2, 0.05, step=0.02)),
    "low alignment": of("ebft__alignment", noisy(0.05, 0.02), noisy(0.2, 0.05)),
    "no signal": (entries(**no_rewards), entries(**some_rewards)),
    "reward always zero": of("rewards__accuracy__mean", [0.0] * 25, [0.25] + [0.0] * 25),
    "cross-entropy diverges": of("ebft__ce_loss", noisy(2, 0.05, 10) + noisy(2.7, 0.05, 20), RISES[0]),
    "loss spikes": of("loss", (noisy(1, 0.05, 9) + [3.0]) * 6, TWO_SPIKES),
    "feature matching diverges": of("ebft__cfm_loss", noisy(0.2, 0.02, 10) + noisy(0.4, 0.02, 20), RISES[1]),
    "overfitting": (entries(**overfits), entries(**does_not)),
    "unstable gradient": of("grad_norm", noisy(1, 0.1, 10) + noisy(30, 5, 20), ONE_SPIKE),
    "off-policy drift": (entries(**{DRIFT: noisy(1.5, 0.1)}), entries(**still_near)),
    "far from the reference model": of("kl", noisy(3, 0.1), noisy(1, 0.3)),
    # SimPO of a model that starts with such a preference
    "rejected completions preferred": of("rewards__margins", noisy(0, 0.05, 10) + PREFERRED, PREFERRED),
    "truncated completions": of("completions__clipped_ratio", noisy(0.9, 0.05), noisy(0.6, 0.1)),
    "length is rewarded": (entries(**as_long, reward=rewards_of_length), entries(**as_long, reward=unrelated_rewards)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_condition_is_recognised_and_a_near_miss_is_not(name):
    with_it, near_miss = CASES[name]
    assert list(seen(with_it)) == [name] and seen(near_miss) == {}
    assert list(CASES) == [condition.name for condition in callback.CONDITIONS]


def test_other_metrics_of_a_condition():
    sampling = {"sampling__importance_sampling_ratio__min": [0.001] * 12}
    for name, metrics in (
        (None, {"ebft__diversity": noisy(1.98, 0.002, 60)}),  # alike before training
        # at once, before there is a start
        ("cross-entropy diverges", {"loss": noisy(2.4, 0.1, 3) + noisy(40, 10, 10)}),
        ("cross-entropy diverges", {"loss": noisy(2.4, 0.05, 10) + noisy(3.2, 0.05, 20)}),
        ("cross-entropy diverges", {"eval_ce_loss": [2.0, 2.5, 2.6]}),
        (None, {"loss": [math.exp(value) for value in noisy(0, 0.7, 300)]}),  # batches differ
        ("feature matching diverges", {"ebft__cfm_loss": [200.0] * 12}),
        ("feature matching diverges", {"eval_cfm_loss": [0.1, 0.2, 0.3]}),
        ("no signal", {"ebft__advantages_std": [0.0] * 12}),
        ("off-policy drift", {"clip_ratio__region_mean": [0.4] * 12}),
        ("off-policy drift", {**sampling, "sampling__sampling_logp_difference__mean": [0.3] * 12}),
    ):
        assert list(seen(entries(**metrics))) == [name] * (name is not None), metrics


def alike(level):
    return entries(ebft__diversity=noisy(0.02, 0.005, 10) + noisy(level, 0.005, 20))


def with_rewards(name, of):
    """The log with the condition `name` of a preference method, which samples nothing."""
    return [entry | {f"rewards/{of}": 0.1} for entry in CASES[name][0]]


RISING, FAR = "feature matching diverges", "far from the reference model"
SCALED = entries(grad_norm=[NAN, NAN, 1.0, 2.0, NAN])
OTHER_SETTINGS = [
    # the diversity of identical samples depends on the feature space
    (alike(0.4), {"samples": 4, "whitened": True}, "samples become identical"),
    (alike(0.2), {"samples": 8, "whitened": True}, "samples become identical"),
    (alike(0.4), {"samples": 4, "whitened": False}, None),
    # samples that become similar change the space
    (CASES[RISING][0], {"whitened": True}, None),
    # infinite gradients of the scaler are normal
    (SCALED, {"fp16": True}, None),
    (entries(grad_norm=[NAN] * 3), {"fp16": True}, "non-finite values"),
    # the entropy is that of given completions, and the divergence of KTO a sum over tokens
    (with_rewards("entropy collapse", "chosen"), {}, None),
    (with_rewards(FAR, "rejected"), {}, None),
]


@pytest.mark.parametrize(("log", "setting", "name"), OTHER_SETTINGS)
def test_settings_and_methods(log, setting, name):
    assert list(seen(log, **setting)) == [name] * (name is not None)


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "golden").glob("*.json")), ids=lambda path: path.stem)
def test_golden_runs_are_healthy(path):
    """A random model never ends its completions, so these are cut at their maximum length."""
    log = json.loads(path.read_text(encoding="utf-8"))["steps"]
    assert seen(log).keys() <= {"truncated completions"}


def test_the_options_of_remedies_exist():
    keys = {option.key for options in option_groups().values() for option in options}
    text = " ".join(condition.remedy for condition in callback.CONDITIONS)
    used = set(re.findall(r"\b(?:[a-z]+\.)?[a-z]+(?:_[a-z]+)+\b|\b(?:ebft|trl)\.[a-z_]+", text))
    assert used <= keys | {"frac_reward_zero_std", "stop_token_ids", "kwargs.stop_token_ids"}
