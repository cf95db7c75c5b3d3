"""What rollouts that end with their text change: EBFT on translations with `stop_at_end` on and off, beside SFT.

    python studies/smollm2/ends.py --seeds 0             # a file in results/ends for each run; again: what is missing
    python studies/smollm2/ends.py --table               # the table of docs/results.md, from these files

A stopped run goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import MEAN, Cell, Study, parser_of, study_of

RUNS = {
    "pretrained": ("none", ()),
    "SFT": ("sft", ()),
    **{
        f"EBFT, ce_coef {ce}, stop_at_end {str(stop).lower()}": (
            "ebft",
            (*MEAN, f"ebft.ce_coef={ce}", f"ebft.stop_at_end={str(stop).lower()}"),
        )
        for ce in (0.2, 0)
        for stop in (True, False)
    },
}
METRICS = ("ce_end", "ce_text", "p_end", "cfm_loss", "chrf_greedy", "chrf_pass@1")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS), help="some of the runs")
    parser.add_argument("--table", action="store_true", help="print the table of the runs that are there")
    arguments = parser.parse_args()
    study = replace(study_of(arguments), ends=True)
    folder = study.results / "ends"
    if arguments.table:
        print(table(folder))
        return
    from data import make_data
    from run import machine_card, train_cell, write_result

    make_data(study)
    for seed in arguments.seeds:
        for name in arguments.only:
            method, overrides = RUNS[name]
            cell = Cell("translation", "base", method, seed, name.partition(", ")[2].replace(", ", " "), overrides)
            path = folder / f"{cell.name}.json"
            if path.exists() or (method == "none" and seed):
                continue
            trained = train_cell(study, cell) if method != "none" else {}
            about = {"run": name, "seed": seed, "machine": machine_card()}
            write_result(path, {**about, **trained, "metrics": measured(study, cell)})


def measured(study: Study, cell: Cell) -> dict[str, float]:
    """The metrics of a model on the test translations."""
    from measure import completions, features, loaded

    from ebft.data.load import load_test_datasets

    policy, tokenizer, config = loaded(study, cell)
    rows, _ = load_test_datasets(config, tokenizer)
    blocks, full = features(study, cell, "test")["metrics"], completions(study, cell)["metrics"]
    return {**blocks, **full, **ends_of(policy, rows, tokenizer.eos_token_id)}


def ends_of(policy: Any, rows: Any, end: int) -> dict[str, float]:
    """Cross-entropy of end tokens and of others, and the mean probability of an end where a text goes on."""
    import torch

    values: dict[str, list[float]] = {"ce_end": [], "ce_text": [], "p_end": []}
    for row in rows:
        ids = torch.tensor(row["input_ids"], device=policy.device)
        with torch.no_grad():
            logps = policy(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        for place in range(max(row["prompt_length"], 1), len(ids)):
            is_end = ids[place] == end
            values["ce_end" if is_end else "ce_text"].append(-logps[place - 1, ids[place]].item())
            if not is_end:
                values["p_end"].append(logps[place - 1, end].exp().item())
    return {name: statistics.fmean(each) for name, each in values.items()}


def table(folder: Path) -> str:
    """A row for each run: means over seeds, and the difference of the largest and the smallest."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(result["run"], []).append(result["metrics"])
    lines = [f"| run | seeds | {' | '.join(METRICS)} |", "| --- " * (len(METRICS) + 2) + "|"]
    for name in filter(found.get, RUNS):
        cells = [[of_seed[metric] for of_seed in found[name]] for metric in METRICS]
        shown = [f"{statistics.fmean(v):.4f} ({max(v) - min(v):.4f})" for v in cells]
        lines.append(f"| {name} | {len(found[name])} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
