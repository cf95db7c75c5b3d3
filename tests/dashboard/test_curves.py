"""Metrics over steps, the curves they become, and their drawing."""

import pytest

from ebft.tools.dashboard import live as metrics_module
from ebft.tools.dashboard.live import Curve, Metrics, Series, curves_of, range_text
from ebft.tools.dashboard.panels import band, limits, number, plot
from tests.dashboard.runs import STRIDED, held_out_line, log_line


def series(values):
    found = Series()
    for step, value in enumerate(values, 1):
        found.add(step, value)
    return found


def test_long_series_are_averaged(monkeypatch):
    monkeypatch.setattr(metrics_module, "MAX_POINTS", 4)
    found = series([1, 3, 5, 7, 9])
    assert found.steps == [1.5, 3.5, 5] and found.values == [2, 6, 9] and found.width == 2
    found = series(range(1000))
    assert len(found.values) <= 5 and found.values == sorted(found.values)
    assert 0 < found.values[0] < found.values[-1] < 1000


def test_what_is_no_number_is_left_out():
    found = Metrics()
    for line in ({"step": 1, "loss": None, "a": "text", "b": True, "epoch": 1.0}, {"loss": 1.0}, {"step": None}):
        found.add(line)
    assert found.series == {} and found.last_step == 1
    found.add({"step": 2, "loss": 1, "nan": float("nan")})
    assert list(found.series) == ["loss"] and found.latest == {"loss": 1}


def test_the_speed_is_that_of_the_last_logs_of_training():
    found = Metrics()
    assert found.seconds_per_step() is None
    for step in range(1, 101):
        found.add(log_line(step))
    found.add(held_out_line(100, 0.1) | {"time": 1e12})  # an evaluation is no step
    assert found.seconds_per_step() == pytest.approx(2.0)
    assert found.seconds_per_step(since=1_700_000_000.0 + 200) is None  # a single log since then


def test_the_curves_of_runs():
    found = Metrics()
    found.add(log_line(1))
    found.add(held_out_line(1, 0.5))
    curves = {curve.title: curve for curve in curves_of(found, STRIDED)}
    assert list(curves)[:3] == ["alignment", "diversity", "reward"]
    assert {"loss", "grad_norm", "grad norms of terms", "held-out cfm_loss"} <= curves.keys()
    assert list(curves["grad norms of terms"].series) == ["rl", "ce"]
    assert curves["alignment"].healthy == (0.3, 1.9) and curves["loss"].healthy is None
    found = Metrics()
    found.add({"step": 1, "reward": 1.0, "rewards/parses/mean": 0.5, "rewards/feature_matching/mean": 0.1, "kl": 0.1})
    curves = curves_of(found, {"rl": "grpo"})
    assert [curve.title for curve in curves] == ["total reward", "rewards", "kl"]
    assert list(curves[1].series) == ["parses", "feature_matching"]


def test_axes():
    assert limits([1.0, 2.0], None) == pytest.approx((0.95, 2.05))
    assert limits([0.5, 0.6], (0.35, 0.9)) == pytest.approx((0.3375, 0.6125))  # 0.9 is too far away
    assert limits([3.0], None)[0] < 3.0 < limits([3.0], None)[1] and limits([0.0], None)[1] > 0
    assert limits([0.0, 10.0], None)[0] == 0.0 and limits([-1.0, 1.0], None)[0] < -1
    assert band((0.3, 0.9), 0.0, 0.5) == (0.3, 0.5) and band((None, 0.1), -1.0, 1.0) == (-1.0, 0.1)
    assert band((0.3, 0.9), 1.0, 2.0) is None
    values, texts = (0, -1.234, 999.6, 1234.5, 123456, -0.0033, 0.9996), "0 -1.23 999.6 1234 1.23e5 -0.0033 1"
    assert [number(value) for value in values] == texts.split()
    assert [range_text(found) for found in ((0.3, 0.9), (None, 0.1), (2, None))] == ["0.3-0.9", "<0.1", ">2"]


def test_a_rising_line_is_drawn():
    text = plot(Curve("loss", {"loss": series(range(1, 9))}, "v"), 18, 4)
    lines = text.plain.split("\n")
    assert lines[0] == "loss  8 v" and len(lines) == 4 and all(len(line) <= 18 for line in lines)
    assert lines[1].startswith("     8.35 ") and lines[2].startswith("     0.65 ")
    assert lines[3].split() == ["1", "step", "8"]
    upper, lower = lines[1][10:], lines[2][10:]
    assert upper.strip() and lower.strip() and upper.lstrip() != upper and not lower[:4].isspace()


@pytest.mark.parametrize("size", [(80, 20), (8, 2), (0, 0)])
def test_any_size_and_any_number_of_points(size):
    for values in ([], [1.0], [0.0, 0.0]):
        lines = plot(Curve("title", {"a": series(values), "b": Series()}, healthy=(0, 1)), *size).plain.split("\n")
        assert len(lines) <= max(1, size[1]) and all(len(line) <= max(1, size[0]) for line in lines[1:])
