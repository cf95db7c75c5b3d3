"""Which curves are shown for a run, in which order, and the range in which a metric is healthy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebft.dashboard.metrics import Metrics, Series

Range = tuple[float | None, float | None]  # None: no bound


@dataclass
class Curve:
    """A plot: its title, one or more series by label, the desired direction (^, v or none), a healthy range."""

    title: str
    series: dict[str, Series]
    wanted: str = ""
    healthy: Range | None = None

    def values(self) -> dict[str, float]:
        """The last value of each series that has one."""
        return {label: series.values[-1] for label, series in self.series.items() if series.values}


# Title, metrics with labels, desired direction.
_CURVES: tuple[tuple[str, dict[str, str], str], ...] = (
    ("alignment", {"ebft/alignment": ""}, "^"),
    ("diversity", {"ebft/diversity": ""}, "v"),
    ("reward", {"ebft/mean_reward": ""}, "^"),
    ("total reward", {"reward": ""}, "^"),
    ("loss", {"loss": ""}, ""),
    ("cfm_loss", {"ebft/cfm_loss": ""}, "v"),
    ("grad_norm", {"grad_norm": ""}, ""),
    ("grad norms of terms", {"ebft/rl_grad_norm": "rl", "ebft/ce_grad_norm": "ce"}, ""),
    ("ce_loss", {"ebft/ce_loss": ""}, "v"),
    ("rl_loss", {"ebft/rl_loss": ""}, ""),
    ("held-out cfm_loss", {"eval_cfm_loss": ""}, "v"),
    ("held-out ce_loss", {"eval_ce_loss": ""}, "v"),
    ("held-out loss", {"eval_loss": ""}, "v"),
    ("held-out alignment", {"eval_alignment": ""}, "^"),
    ("held-out reward", {"eval_reward": ""}, "^"),
    ("entropy", {"entropy": ""}, ""),
    ("kl", {"kl": ""}, ""),
    ("reward_std", {"reward_std": ""}, ""),
    ("completion length", {"completions/mean_length": ""}, ""),
    ("truncated completions", {"completions/clipped_ratio": ""}, "v"),
    ("learning_rate", {"learning_rate": ""}, ""),
    ("generated tokens per second", {"throughput/generated_tokens_per_s": ""}, ""),
)


def curves_of(metrics: Metrics, config: dict[str, Any]) -> list[Curve]:
    """The curves for the metrics that the run has; parts of a total reward share a plot."""
    found = []
    for title, labels, wanted in _CURVES:
        series = {label or title: metrics.series[name] for name, label in labels.items() if name in metrics.series}
        if series:
            found.append(Curve(title, series, wanted, healthy_range(title, config)))
    parts = {
        name.removeprefix("rewards/").removesuffix("/mean"): series
        for name, series in metrics.series.items()
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    if parts and list(parts) != ["feature_matching"]:
        position = next((index + 1 for index, curve in enumerate(found) if curve.title == "total reward"), 0)
        found.insert(position, Curve("rewards", parts, "^"))
    return found


def healthy_range(title: str, config: dict[str, Any]) -> Range | None:
    """The usual range of values of a curve, by the method and the reward of the config; None if there is none.

    Values outside can be right for a run; they are a reason to look at its rollouts.
    """
    method, ebft = config.get("rl"), config.get("ebft")
    if title == "grad_norm":
        return {"ebft": (None, 3.0), "grpo": (None, 1.0), "gdpo": (None, 1.0)}.get(str(method), (None, 10.0))
    if method == "ebft" and title == "alignment" and isinstance(ebft, dict) and ebft.get("use_whitening"):
        return (0.3, 1.9)
    if method in ("ebft", "grpo", "gdpo"):
        return {"kl": (0.0, 0.5), "truncated completions": (None, 0.3)}.get(title)
    return None


def range_text(healthy: Range) -> str:
    """A range as text, for example `0.3-0.9` or `<0.1`."""
    low, high = healthy
    if low is None:
        return f"<{high:g}"
    return f">{low:g}" if high is None else f"{low:g}-{high:g}"
