"""Whether a training step fits on cards with 24, 48 and 80 GiB, planned as `ebft doctor CONFIG --memory 24GiB` does.

    python -m benchmarks.plans CONFIG ...            # print the tables of these configs
    python -m benchmarks.plans --write CONFIG ...    # also store them: benchmarks/results/plans.json and docs/speed.md
    python -m benchmarks.plans --stored              # write the tables of stored plans into docs/speed.md again

Needs no weights, data or GPU, and about a minute per config. These are plans, not measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebft import load_config
from ebft.errors import ModelError
from ebft.machine import gib
from ebft.tools.doctor.fit import floor, model_config_of, plan_on, room, with_changes
from ebft.tools.doctor.known import CARDS, Card
from ebft.tools.doctor.plan import BEFORE, Planner

STORED = Path(__file__).parent / "results" / "plans.json"
PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
BEGIN, END = "<!-- plans -->", "<!-- end of plans -->"
SIZES = (24, 48, 80)  # GiB


def plan(path: str, planner: Planner) -> dict[str, Any]:
    """What the step of a config needs, and what to change where it does not fit."""
    config = load_config(path)
    model_config, _ = model_config_of(config)
    fits = {}
    for size in SIZES:
        card = Card(size)
        found = plan_on(config, model_config, card, planner)
        made, changed = with_changes(config, model_config, card, planner, found)
        fits[str(size)] = {"fits": found.total <= room(card, config), "changes": made, "changed": changed.total}
    step = {name: use for name, use in found.phases.items() if name not in BEFORE}
    least = floor(found, CARDS["h100"], config)
    return {
        "config": Path(path).stem,
        "model": config.base_model,
        "tokens": config.sequence_len,
        "weights": found.weights,
        "peaks": {name: use.peak for name, use in step.items()},
        "kernels": sum(use.kernels for use in step.values()),
        "pflop": sum(use.flops for use in step.values()) / 1e15,
        "h100_seconds": None if least is None else vars(least),
        "fits": fits,
    }


def tables(plans: list[dict[str, Any]]) -> Iterator[str]:
    """The tables of plans in Markdown, and the changes where a step does not fit."""
    rows = []
    for each in plans:
        peak = max(each["peaks"], key=each["peaks"].get)
        cells = ["fits" if each["fits"][str(size)]["fits"] else "does not fit" for size in SIZES]
        least = each["h100_seconds"]
        bound = max(least, key=least.get).replace("moved", "memory") if least else ""
        seconds = f"{max(least.values()):.1f} s ({bound})" if least else ""
        largest = f"{gib(each['peaks'][peak])} ({peak})"
        rows.append([f"`{each['config']}`", gib(each["weights"]), largest, *cells, seconds])
    names = [f"{size} GiB" for size in SIZES]
    titles = ["config", "weights", "peak of a step", *names, "a step on an H100, at least"]
    yield "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)) + "\n"
    for each in plans:
        for size, found in each["fits"].items():
            if not found["fits"]:
                how = "nothing that is known makes it fit"
                if found["changes"] is not None:
                    keys = ", ".join(f"`{change.partition(', ')[0].partition(' (')[0]}`" for change in found["changes"])
                    how = f"{keys}: {gib(found['changed'])}"
                yield f"\n- `{each['config']}` on {size} GiB: {how}"


def write_page(plans: list[dict[str, Any]]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{''.join(tables(plans))}\n{END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", metavar="CONFIG")
    parser.add_argument("--write", action="store_true", help="store the plans, and write the tables of docs/speed.md")
    parser.add_argument("--stored", action="store_true", help="write the tables of the stored plans")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, Any]] = {}
    if STORED.exists() and (options.write or options.stored):
        found = {each["config"]: each for each in json.loads(STORED.read_text(encoding="utf-8"))}
    failed = False
    with Planner() as planner:
        for path in options.configs:
            try:
                planned = plan(path, planner)
            except ModelError as error:
                print(f"{path}: {error}", flush=True)
                failed = True
                continue
            print("".join(tables([planned])), flush=True)
            found[planned["config"]] = planned
            if options.write:
                STORED.write_text(json.dumps(list(found.values()), indent=2) + "\n", encoding="utf-8")
    if options.write or options.stored:
        write_page(list(found.values()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
