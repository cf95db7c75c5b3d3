"""Markdown tables of stored results: the models of a task, differences from SFT and from the start, costs, lengths."""

from __future__ import annotations

import math
import statistics
from fnmatch import fnmatch
from typing import Any

from cells import FLOAT32, SETTINGS, SHARES
from intervals import Estimate, difference, is_start, over_seeds, spread_of_seeds, t_quantile
from metrics import CORPUS, MAIN

COSTS = {
    "learning_rate": "learning rate",
    "steps": "steps",
    "documents": "documents",
    "generated_tokens": "generated tokens",
    "flops": "FLOPs",
}
METHODS = (
    "none",
    "sft",
    "sft_flops",
    "sdft",
    "rlvr",
    "structured",
    *(f"ebft-{name.replace(' ', '_')}" for name in SETTINGS),
)
LENGTHS = (8, 16, 32, 64, 128)  # of rollouts, in tokens
SIGNAL_STEP = 16  # documents of a step in the statistics of gradient_signal.py
AFTER_END = {"ended": "share that ended", "cfm_loss": "loss, all tokens", "cfm_loss_to_end": "loss, up to the end"}


def model_table(cells: list[dict[str, Any]], task: str, start: str, columns: dict[str, str]) -> str:
    """One row for each method and setting: metrics as mean ± half width over seeds and files."""
    rows = []
    for group in groups_of(cells, task, start):
        values = [number(over_seeds(cells, group, metric)) for metric in columns]
        name = label(group) + precision_mark(cells, group, f"{task}-{start}-sft")
        rows.append([name, str(len(seeds_of(cells, group))), *values])
    return markdown(["model", "seeds", *columns.values()], rows)


def main_table(cells: list[dict[str, Any]], tasks: dict[str, str]) -> str:
    """Means over seeds of MAIN, and FLOPs, for each method from the pretrained model, by task with its title."""
    rows = []
    for task, title in tasks.items():
        for group in groups_of(cells, task, "base"):
            found = [[over_seeds(cells, group, metric) for metric in metrics] for metrics in MAIN.values()]
            values = [next((f"{each.mean:.3f}" for each in of_metric if each), "") for of_metric in found]
            costs_of = [cell["cost"] for cell in of_group(cells, group) if "cost" in cell]
            seeds = "" if is_start(group) else str(len(seeds_of(cells, group)))
            documents, flops = (
                f"{statistics.mean(cost[name] for cost in costs_of):{form}}" if costs_of else ""
                for name, form in (("documents", ".0f"), ("flops", ".1e"))
            )
            name = label(group) + precision_mark(cells, group, f"{task}-base-sft")
            rows.append([title, name, seeds, *values, documents, flops])
            title = ""
    return markdown(["task", "model", "seeds", *MAIN, "documents", "FLOPs"], rows)


def corpus_table(cells: list[dict[str, Any]], task: str, start: str) -> str:
    """Scores of a corpus as a whole: means over seeds, and the interval over these where there are three."""
    rows = []
    for group in groups_of(cells, task, start):
        found = [cell["metrics"] for cell in cells if cell["cell"]["group"] == group]
        values = [[metrics[name] for metrics in found if name in metrics] for name in CORPUS]
        rows.append([label(group), *map(of_seeds, values)])
    return markdown(["model", *CORPUS.values()], rows)


def length_table(cells: list[dict[str, Any]], task: str, start: str) -> str:
    """The feature-matching loss of rollouts by their length: means over seeds, with the interval over three.

    The last row is how much EBFT, mean, is above SFT, paired by seed.
    """
    rows = []
    for group in groups_of(cells, task, start):
        curves = curve_of_seeds(cells, group).values()
        rows.append([label(group), *(of_seeds([curve[x] for curve in curves if x in curve]) for x in LENGTHS)])
    if found := length_differences(cells, task, start):
        title = "EBFT, mean − SFT, as many documents"
        rows.append([title, *(of_seeds(found.get(x, []), signed=True) for x in LENGTHS)])
    return markdown(["model", *(f"{length} tokens" for length in LENGTHS)], rows)


def after_end_table(models: dict[str, dict[str, dict[str, float]]]) -> str:
    """What after_end.py found in each model, by the length of the rollouts."""
    lengths = [length for length in LENGTHS if all(str(length) in found["ended"] for found in models.values())]
    rows = [
        [f"`{name}`", title, *(f"{found[metric][str(length)]:.3f}" for length in lengths)]
        for name, found in models.items()
        for metric, title in AFTER_END.items()
    ]
    return markdown(["model", "", *(f"{length} tokens" for length in lengths)], rows)


def temperature_table(models: dict[str, dict[str, dict[str, float]]]) -> str:
    """What temperatures.py found in each model: chrF of samples, and their distance from each other."""
    rows = [
        [f"`{name}`", temperature, f"{found['chrf_pass@1']:.3f}", f"{found['pair_distance']:.3f}"]
        for name, of_model in models.items()
        for temperature, found in of_model.items()
    ]
    return markdown(["model", "temperature", "chrF ↑", "distance of samples ↑"], rows)


def length_differences(cells: list[dict[str, Any]], task: str, start: str) -> dict[int, list[float]]:
    """By length of rollouts, how much the loss of EBFT, mean, is above that of SFT with each seed that both have."""
    ours, theirs = (curve_of_seeds(cells, f"{task}-{start}-{method}") for method in ("ebft-mean", "sft"))
    found: dict[int, list[float]] = {}
    for seed in sorted(ours.keys() & theirs.keys()):
        for length in ours[seed].keys() & theirs[seed].keys():
            found.setdefault(length, []).append(ours[seed][length] - theirs[seed][length])
    return found


def curve_of_seeds(cells: list[dict[str, Any]], group: str) -> dict[int, dict[int, float]]:
    """By seed the feature-matching loss of long rollouts by their length."""
    found = [cell for cell in of_group(cells, group) if "rollouts" in cell]
    return {cell["cell"]["seed"]: dict(map(tuple, cell["rollouts"]["cfm_loss"])) for cell in found}


def document_counts(cells: list[dict[str, Any]], task: str, start: str, columns: dict[str, str]) -> str:
    """How many documents each of the metrics `columns` is a mean over, as a sentence."""
    names: dict[int, list[str]] = {}
    for metric, heading in columns.items():
        for group in groups_of(cells, task, start):
            found = [cell["weights"][metric] for cell in of_group(cells, group) if metric in cell["weights"]]
            if found:
                names.setdefault(sum(weight > 0 for weight in found[0]), []).append(heading.rstrip(" ↑↓"))
                break
    listed = [f"{count} ({'; '.join(names[count])})" for count in sorted(names, reverse=True)]
    return f"Documents: {', '.join(listed)}." if listed else ""


def cost_table(cells: list[dict[str, Any]], task: str, start: str) -> str:
    """What training cost, by method and setting, and how long the measurements took.

    Not how long training took: a run that was stopped and resumed only knows the seconds since then.
    """
    rows = []
    for group in groups_of(cells, task, start):
        seconds = seconds_of(cells, group, ("features", "completions", "long"))
        shown = [] if is_start(group) else costs(cells, group)
        minutes = "" if seconds is None else f"{seconds / 60:.0f}"
        rows.append([label(group), *(shown or [""] * len(COSTS)), minutes])
    return markdown(["model", *COSTS.values(), "measuring, min"], rows)


def signal_table(found: dict[str, Any]) -> str:
    """What gradient_signal.py found: a row for each length, whitening and number of samples."""
    names = {"cosine": "in the long run", "step_cosine": "one step", "share_of_signal": "share of signal"}
    names["cosine_with_longest"] = f"in the long run, with the loss of {list(found['lengths'])[-1]} tokens"
    quantile = t_quantile(found["batches"] - 1)
    rows = []
    for length, values in found["lengths"].items():
        for setting, value in values.items():
            shown = [measurable(value[name], value[f"{name}_error"], quantile) for name in names]
            cosine = step_cosine(value, 4 * SIGNAL_STEP / int(setting.rpartition(" = ")[2]))
            equal = "not measurable" if math.isnan(cosine) else f"{cosine:.2f}"
            rows.append([length, setting, *shown[:2], equal, *shown[2:]])
    titles = list(names.values())
    return markdown(["tokens", "reward", *titles[:2], "one step, as many rollouts", *titles[2:]], rows)


def step_cosine(value: dict[str, Any], documents: float) -> float:
    """The cosine of a step of so many documents, from the statistics of one of 16; NaN without signal."""
    share, cosine = value["share_of_signal"], value["cosine"]
    is_seen = share > 0 and cosine is not None
    return cosine / (1 + (1 / share - 1) * SIGNAL_STEP / documents) ** 0.5 if is_seen else math.nan


def measurable(value: float | None, error: float | None, quantile: float) -> str:
    """A value with its 95% interval, or that nothing is seen, where noise leaves no signal of which there is one."""
    return "not measurable" if value is None or error is None else f"{value:.3f} ± {quantile * error:.3f}"


def phase_table(cells: list[dict[str, Any]]) -> str:
    """Mean seconds of the phases of a structured step, one row for each seed."""
    found = sorted((cell for cell in cells if cell.get("phases")), key=lambda cell: cell["cell"]["seed"])
    names = ("wait", "reward", "update")
    rows = []
    for cell in found:
        phases = cell["phases"]
        step = sum(phases[name] for name in names)
        shares = [f"{phases[name]:.1f} ({phases[name] / step:.0%})" for name in names]
        rows.append([str(cell["cell"]["seed"]), f"{step:.1f}", *shares, f"{phases['generation']:.1f}"])
    return markdown(["seed", "step, s", "waiting", "reward", "update", "generation, meanwhile"], rows)


def difference_table(cells: list[dict[str, Any]], task: str, start: str, columns: dict[str, str]) -> str:
    """How much every method is above SFT from the same start, paired by seed and document."""
    reference = f"{task}-{start}-sft"
    rows = [
        [
            label(group) + precision_mark(cells, group, reference),
            *(number(difference(cells, group, reference, metric), signed=True) for metric in columns),
        ]
        for group in groups_of(cells, task, start)
        if group != reference
    ]
    return markdown([f"model − {label(reference)}", *columns.values()], rows)


def precision_mark(cells: list[dict[str, Any]], group: str, reference: str) -> str:
    """² where the weights of one side are float32, and of the other bfloat16."""
    precisions = {
        any(fnmatch(cell["cell"]["name"], pattern) for pattern in FLOAT32)
        for cell in of_group(cells, group) + of_group(cells, reference)
    }
    return "²" if len(precisions) > 1 else ""


def groups_of(cells: list[dict[str, Any]], task: str, start: str) -> list[str]:
    """The groups of a task and start that were run, in the order of the tables."""
    there = {cell["cell"]["group"] for cell in cells if (cell["cell"]["task"], cell["cell"]["start"]) == (task, start)}
    known = [f"{task}-{start}-{method}" for method in METHODS]
    return [group for group in known if group in there]


def of_group(cells: list[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    """The cells of a group."""
    return [cell for cell in cells if cell["cell"]["group"] == group]


def seeds_of(cells: list[dict[str, Any]], group: str) -> set[int]:
    """The seeds of a group."""
    return {cell["cell"]["seed"] for cell in of_group(cells, group)}


def label(group: str) -> str:
    """A group as the tables name it."""
    _, start, method, *setting = group.split("-", 3)
    starts = {"base": "pretrained model", "warm": "warm start"}
    names = {"none": starts[start], "sft": "SFT, as many documents", "sft_flops": "SFT, same FLOPs", "rlvr": "RLVR"}
    share = f"{SHARES[group]:g} of the" if group in SHARES else "same"
    names |= {"structured": "EBFT, structured", "sdft": f"self-distillation, {share} FLOPs"}
    return names[method] if method != "ebft" else f"EBFT, {setting[0].replace('_', ' ')}"


def costs(cells: list[dict[str, Any]], group: str) -> list[str]:
    """Means over seeds of what the runs of a group cost."""
    found = [cell for cell in of_group(cells, group) if "cost" in cell]
    values = [[{**cell, **cell["cost"]}[name] for cell in found] for name in COSTS]
    means = [statistics.mean(known) if (known := [v for v in row if v is not None]) else None for row in values]
    return ["" if mean is None else f"{mean:.2e}" if mean >= 1e7 else f"{mean:,.6g}" for mean in means]


def seconds_of(cells: list[dict[str, Any]], group: str, names: tuple[str, ...]) -> float | None:
    """Mean over seeds of the seconds of some parts of a cell; None where no cell has them."""
    found = [sum(cell["seconds"].get(name, 0) for name in names) for cell in of_group(cells, group) if "cost" in cell]
    return statistics.mean(found) if found else None


def of_seeds(values: list[float], signed: bool = False) -> str:
    """The mean of one value for each seed, with Student's interval where there are more than two."""
    if len(values) < 3:
        return f"{statistics.mean(values):{'+' if signed else ''}.3f}" if values else ""
    return number(Estimate(statistics.mean(values), spread_of_seeds(values), 0.0, len(values)), signed)


def number(found: Estimate | None, signed: bool = False) -> str:
    """`mean ± half width`, with as many decimals as the half width has two significant digits of.

    With one seed the half width is that over files, and marked.
    """
    if found is None:
        return ""
    sign = "+" if signed else ""
    half, mark = (found.files, "¹") if math.isnan(found.seeds) else (found.half, "")
    if math.isnan(half) or half == 0:
        return f"{found.mean:{sign}.3f}{mark}"
    decimals = min(5, max(1, 1 - math.floor(math.log10(half))))
    if round(abs(found.mean), decimals) == round(half, decimals):
        decimals += 1  # to see which is larger
    mean = round(found.mean, decimals) + 0.0  # no -0.0
    return f"{mean:{sign}.{decimals}f} ± {half:.{decimals}f}{mark}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    line = lambda entries: f"| {' | '.join(entries)} |"
    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])
