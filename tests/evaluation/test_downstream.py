"""Functions of the user's own as metrics: how they are called, what becomes of what they return."""

import numpy as np
import pytest

from ebft import errors, evaluate, load_config
from ebft.config.keys.data import DatasetEntry
from ebft.tools.evaluation.task import HeldOut, downstream_scores, load_metrics

HERE = "tests.evaluation.metrics"


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", ["strided", "plain", "structured"])
def test_metrics_on_whole_completions(kind, write_config, models):
    """The function's asserts hold: the prompt as text, one completion, and the raw row with its own columns."""
    names = ("length", "even_rows", "reward", "curve_of")
    path = write_config(kind, evaluation={"metrics": [f"{HERE}.{name}" for name in names], "max_new_tokens": 6})
    (result,) = evaluate(load_config(path), [str(models / "adapter")]).models
    metrics = result.metrics
    samples = 4 if kind == "plain" else 3
    assert 0 < metrics["length_pass@1"] < metrics[f"length_pass@{samples}"]
    assert metrics["length_greedy"] > 0
    assert metrics["even_rows_pass@1"] == metrics["even_rows_greedy"] == 1.0  # rows that it does not apply to are out
    assert result.intervals["length_pass@1"][0] < metrics["length_pass@1"]
    assert metrics[f"{HERE}.reward_greedy"] == 100.0 and metrics["curve_of_greedy"] == 1.0
    assert kind == "plain" or metrics["reward_pass@1"] < 50  # that of the features


LIMITED = ["ebft.gt_length_floor=1", "trl.max_completion_length=40"]
NEW, BY_REFERENCE = "evaluation.max_new_tokens=", "ebft.gt_length_multiplier="


@pytest.mark.parametrize(("kind", "key", "small", "large", "metric", "factor"), [
    ("strided", NEW, 1, 12, "length_greedy", 1), ("strided", BY_REFERENCE, 0.2, 2.0, "length_pass@1", 2),
    # it would tell the model when to stop
    pytest.param("plain", BY_REFERENCE, 0.2, 2.0, "length_pass@1", 0, marks=pytest.mark.slow),
])  # fmt: skip
def test_limits_of_completions(kind, key, small, large, metric, factor, write_config):
    path = write_config(kind, evaluation={"metrics": [f"{HERE}.length"], "documents": 4})
    found = [evaluate(load_config(path, [*LIMITED, f"{key}{n}"])).models[0].metrics[metric] for n in (small, large)]
    assert found[0] < found[1] / factor if factor else found[0] == found[1]


def test_pass_at_k_and_greedy_by_hand_and_a_row_of_its_own():
    values = {"a": 0.0, "b": 1.0, "c": 0.5}
    metrics = {"value": lambda prompt, completions, row: values[completions[0]]}
    found = downstream_scores(metrics, [1, 2, 4], "p", ["a", "b", "a", "c", "c"], {})
    # Of the six pairs, three hold b, two more hold c.
    expected = {"value_pass@1": 0.375, "value_pass@2": (3 * 1 + 2 * 0.5) / 6, "value_pass@4": 1.0, "value_greedy": 0.5}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)
    row = {"x": [1.0]}
    takes = lambda prompt, completions, row: np.bool_(row["x"].pop())
    assert downstream_scores({"m": takes}, [1], "p", ["a", "b", "a"], row) == {"m_pass@1": 1.0, "m_greedy": 1.0}
    assert row == {"x": [1.0]}
    with pytest.raises(errors.ConfigError, match="m returned nan.*finite"):
        downstream_scores({"m": lambda prompt, completions, row: float("nan")}, [1], "p", ["a", "b"], {})


def test_raw_rows_over_several_sources_and_names_that_are_shared(rows):
    assert list(load_metrics([f"{HERE}.length", f"{HERE}.length"])) == ["length"]
    assert list(load_metrics(["posixpath.join", "ntpath.join"])) == ["posixpath.join", "ntpath.join"]
    entries = [DatasetEntry(path=str(rows / name), type="ebft_pretrain") for name in ("pairs.jsonl", "texts.jsonl")]
    held_out = HeldOut(None, [], entries)
    assert held_out.raw[0]["number"] == 0 and held_out.raw[8]["number"] == 8
    assert "text" in held_out.raw[9] and held_out.raw[14]["text"] != held_out.raw[9]["text"]
