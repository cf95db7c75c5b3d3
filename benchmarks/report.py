"""The tables of the benchmark as text."""

from __future__ import annotations

from typing import Any

from benchmarks.sides import PHASES

_SECONDS = (*PHASES, "step", "floor")


def card(facts: dict[str, Any]) -> str:
    """One line for each fact."""
    lines = {name: value for name, value in facts.items() if value is not None}
    lines["options"] = ", ".join(f"{name} {value}" for name, value in facts["options"].items())
    return "\n".join(f"{name:>14}  {value}" for name, value in lines.items())


def header() -> str:
    """The columns of `length`. Seconds, unless the name says otherwise."""
    columns = "".join(f"{name:>10}" for name in _SECONDS)
    return f"{'tokens':>6}  {'':<15}{'rounds':>6}{columns}{'/ floor':>9}{'peak MiB':>10}{'tokens/s':>10}{'MFU':>7}"


def length(result: dict[str, Any]) -> str:
    """A row for each side, and what they are to ours."""
    sides = result["sides"]
    lines = [_row(result["length"], name, row) for name, row in sides.items()]
    reference = sides["ours"]
    for name, row in sides.items():
        if name != "ours" and row["rounds"]:
            both = row["peak_mib"] and reference["peak_mib"]
            memory = f", {row['peak_mib'] / reference['peak_mib']:.2f} x memory" if both else ""
            lines.append(f"{'':>8}{name} / ours: {row['step'] / reference['step']:.2f} x time{memory}")
    return "\n".join(lines)


def _row(tokens: int, name: str, row: dict[str, Any]) -> str:
    start = f"{tokens:>6}  {name:<15}{row['rounds']:>6}"
    if not row["rounds"]:
        return f"{start}  failed: {row['failed']}"
    seconds = "".join(f"{row[column]:>10.3f}" if column in row else " " * 10 for column in _SECONDS)
    floor = f"{row['step_over_floor']:.2f}" if "step_over_floor" in row else ""
    memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    return f"{start}{seconds}{floor:>9}{memory:>10}{row['tokens_per_s']:>10.0f}{row['mfu']:>7.1%}"


def growth(results: list[dict[str, Any]]) -> str:
    """How ours grows with the document: time beside FLOPs, memory beside tokens."""
    columns = ("tokens", "counted GFLOP", "needed GFLOP", "GEMM GFLOP/s", "ms / GFLOP", "KiB / token")
    lines = ["ours, by length:", "".join(f"{name:>15}" for name in columns)]
    for result in results:
        row = result["sides"]["ours"]
        values = (
            f"{result['length']}",
            f"{row['counted_gflop']:.1f}",
            f"{sum(result['needed_gflop'].values()):.1f}",
            f"{result['gemm_gflops'][row['dtype']]:.0f}",
            f"{1000 * row['step'] / row['counted_gflop']:.2f}",
            "" if row["peak_mib"] is None else f"{1024 * row['peak_mib'] / result['length']:.0f}",
        )
        lines.append("".join(f"{value:>15}" for value in values))
    return "\n".join(lines)


def whole_runs(results: dict[str, Any]) -> str:
    """What was found out beside the steps, a line each."""
    lines = []
    if "recompilations" in results:
        found = results["recompilations"]
        frames = ", ".join(f"{name} {count}" for name, count in found["frames"].items())
        lines.append(f"frames compiled again in {found['steps']} steps with changing prompts: {frames}")
    if "train" in results:
        found = results["train"]
        lines.append(
            f"ebft train at {found['length']} tokens: {found['whole']:.3f} s a step, of which {found['inside']:.3f} s "
            f"are its loss and gradients ({found['ratio']:.2f} x)"
        )
    return "\n".join(lines)
