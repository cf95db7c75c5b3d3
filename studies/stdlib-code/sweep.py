"""Learning rates: every method gets, for each task and start, the one that serves its own objective best.

They are chosen on the validation part, with a seed that the study does not use; the test part is not looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import settings
from cells import CENTRE, FACTORS, STARTS, TASKS, Cell
from sizes import Size
from stored import load_sweep

SEED = 100
METHODS = ("sft", "ebft", "rlvr")
# What each method trains for, as held-out metrics: higher is better.
OBJECTIVES = {
    "sft": "−cross-entropy",
    "ebft": "reward − ce_coef × cross-entropy",
    "rlvr": "mean of the summed rewards",
}


def sweep_cells(size: Size) -> list[Cell]:
    """One run for each rate of each method, task and start; EBFT with the first of its settings."""
    return [
        Cell(task, start, method, SEED, f"rate {rate:g}", (*_setting(method), f"learning_rate={rate:g}"))
        for task in TASKS
        for start in STARTS
        for method in METHODS
        if method != "rlvr" or task == "functions"
        for rate in size.rates
    ]


def objective(method: str, result: dict[str, Any], ce_coef: float) -> float:
    """The value of a method's objective on held-out documents."""
    metrics = result["metrics"]
    if method == "sft":
        return -metrics["ce_loss"]
    if method == "ebft":
        return metrics["reward_pass@1"] - ce_coef * metrics["ce_loss"]
    # GRPO adds no reward for names where a reference has none.
    names, all_rows = result["per_document"]["uses_names_pass@1"], result["per_document"]["parses_pass@1"]
    return metrics["parses_pass@1"] + sum(names["sum"]) / len(all_rows["sum"])


def tried(size: Size, results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """{"TASK-START-METHOD": {rate: {"objective", "ce_loss", "cfm_loss"}}} of the finished runs."""
    from ebft import load_config

    ce_coef = load_config(settings.config_file("ebft")).ebft.ce_coef
    by_name = {result["cell"]["name"]: result for result in results}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for cell in sweep_cells(size):
        if cell.name in by_name:
            place = found.setdefault(rate_place(cell.task, cell.start, cell.method), {})
            values = {name: by_name[cell.name]["metrics"][name] for name in ("ce_loss", "cfm_loss")}
            values = {"objective": objective(cell.method, by_name[cell.name], ce_coef), **values}
            place[cell.setting.removeprefix("rate ")] = {name: round(value, 6) for name, value in values.items()}
    return found


def best_rates(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """The rate with the highest objective in every place; none where two are equally high."""
    chosen = {}
    for place, by_rate in found.items():
        highest = max(values["objective"] for values in by_rate.values())
        best = [rate for rate, values in by_rate.items() if values["objective"] == highest]
        chosen |= {place: float(best[0])} if len(best) == 1 else {}
    return chosen


def chosen_rate(results: Path, size: Size, cell: Cell) -> float | None:
    """The rate that a sweep has chosen for the method of a cell; None where there was none, for the config's own."""
    found = load_sweep(results, size.name)
    return found["chosen"].get(rate_place(cell.task, cell.start, cell.method)) if found is not None else None


def rate_place(task: str, start: str, method: str) -> str:
    """The name that a learning rate has in the file of a sweep."""
    return f"{task}-{start}-{settings.CONFIG_OF.get(method)}"


def _setting(method: str) -> tuple[str, ...]:
    return FACTORS[CENTRE] if method == "ebft" else ()
