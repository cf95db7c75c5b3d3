"""Learning rates: SFT and EBFT get, on functions, the one that serves their own objective best; others by hand.

They are chosen by short runs from the base model on the validation part, with a seed that the study does not use; the
test part is not looked at. Settings of EBFT that differ in `ce_coef` alone share the rate of their family's first.
"""

from __future__ import annotations

from pathlib import Path

import settings
from cells import SETTINGS, Cell
from scale import Scale
from stored import SWEEP, read

SEED = 100
# Rates that are set by hand, instead of a sweep's or where there was none: place -> (rate, reason).
_AS_ON_FUNCTIONS = (1e-3, "the best rate of the same method on functions; there was no sweep")
_OF_PAPER = (3e-4, "that of configs/ebft.yaml; at 1e-3 with little cross-entropy, models forget; there was no sweep")
BY_HAND: dict[str, tuple[float, str]] = {
    **{f"{task}-{method}": _AS_ON_FUNCTIONS for task in ("translation", "raw") for method in ("sft", "ebft-mean")},
    **{f"{task}-ebft-paper": _OF_PAPER for task in ("translation", "raw")},
}
FAMILIES = ("paper", "mean")  # of EBFT's settings; a setting belongs to the one that its name begins with
# What each method trains for, as validation metrics: higher is better.
OBJECTIVES = {"sft": "−cross-entropy", "ebft": "reward − ce_coef × cross-entropy"}


def sweep_cells(scale: Scale) -> list[Cell]:
    """One short run for each rate of SFT and EBFT."""
    return [
        Cell("functions", "base", method, SEED, f"{family} rate {rate:g}".strip(), _overrides(family, rate), "sweep")
        for method, family in (("sft", ""), ("ebft", "mean"))
        for rate in scale.rates
    ]


def objective(method: str, metrics: dict[str, float], ce_coef: float) -> float:
    """The value of a method's objective on the validation part."""
    return -metrics["ce_loss"] if method == "sft" else metrics["reward_pass@1"] - ce_coef * metrics["ce_loss"]


def tried(scale: Scale, results: Path) -> dict[str, dict[str, dict[str, float]]]:
    """{place: {rate: {"objective", "ce_loss", "cfm_loss"}}} of the stored runs."""
    from ebft import load_config

    found: dict[str, dict[str, dict[str, float]]] = {}
    for cell in sweep_cells(scale):
        stored = read(results / SWEEP / f"{cell.name}.json")
        if stored is not None:
            metrics = stored["metrics"]
            rates = found.setdefault(rate_place(cell), {})
            values = {name: metrics[name] for name in ("ce_loss", "cfm_loss")}
            ce_coef = load_config(settings.config_file("ebft"), list(cell.overrides)).ebft.ce_coef
            rates[cell.setting.rpartition(" ")[2]] = {"objective": objective(cell.method, metrics, ce_coef), **values}
    return found


def best_rates(found: dict[str, dict[str, dict[str, float]]], rates: tuple[float, ...]) -> dict[str, float]:
    """The rate with the highest objective in every place where all were tried."""
    complete = {place: by_rate for place, by_rate in found.items() if len(by_rate) == len(rates)}
    return {
        place: float(max(by_rate, key=lambda rate: by_rate[rate]["objective"])) for place, by_rate in complete.items()
    }


def chosen_rate(results: Path, cell: Cell) -> float | None:
    """The learning rate of a cell; None for the config's own."""
    if cell.measures == "sweep" or cell.method == "none":
        return None
    place = rate_place(cell)
    if place in BY_HAND:
        return BY_HAND[place][0]
    return (read(results / "sweep.json") or {"chosen": {}})["chosen"].get(place)


def rate_place(cell: Cell) -> str:
    """The name that a learning rate has in sweep.json: task, method and family."""
    family = next((name for name in FAMILIES if cell.setting.startswith(name)), "")
    return "-".join(part for part in (cell.task, settings.CONFIG_OF[cell.method], family) if part)


def _overrides(family: str, rate: float) -> tuple[str, ...]:
    return (*SETTINGS.get(family, ()), f"learning_rate={rate:g}")
