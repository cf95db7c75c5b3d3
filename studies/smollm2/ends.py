"""What rollouts that end with their text change: EBFT on translations with `stop_at_end` on and off, beside SFT.

    python studies/smollm2/ends.py --seeds 0             # a file in results/ends for each run; again: what is missing
    python studies/smollm2/ends.py --table               # the table of docs/results.md, from these files

Measured on the study's test translations: the cross-entropy of the tokens that end a text and of the others, the
probability of an end where the text goes on, chrF of greedy translations and of samples, and the feature-matching loss
of blocks up to the end. A stopped run goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import measure
import settings
import stored
from cells import MEAN, Cell
from job import Job
from options import parsed, scale_and_place, study_options
from run_cell import Clock, machine_card, train_cell
from settings import Place
from starts import make_data

FOLDER = "ends"
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
    parser = study_options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS), help="some of the runs")
    parser.add_argument("--table", action="store_true", help="print the table of the runs that are there")
    arguments = parsed(parser)
    folder = arguments.results / FOLDER
    if arguments.table:
        print(table(folder))
        return
    scale, place = scale_and_place(arguments)
    place, made_from = make_data(place, scale, arguments.results)
    for seed in arguments.seeds:
        for name in arguments.only:
            method, overrides = RUNS[name]
            setting = name.partition(", ")[2].replace(", ", " ")
            cell = Cell("translation", "base", method, seed, setting, overrides)
            path = folder / f"{cell.name}.json"
            if path.exists() or (method == "none" and seed):
                continue
            job, clock = Job(cell, scale, place, arguments.results, made_from), Clock()
            trained = clock.time("train", lambda job=job: train_cell(job)) if method != "none" else {}
            model = str(place.model(cell)) if trained else place.base_model
            found = clock.time("measure", lambda job=job, model=model: measured(job, model))
            about = {"run": name, "seed": seed, "machine": machine_card(), "seconds": clock.seconds}
            stored.write_json(path, stored.rounded({**about, **trained, "metrics": found}))


def measured(job: Job, model: str) -> dict[str, float]:
    """The metrics of a model on the test translations."""
    cell, place, scale = job.cell, job.place, job.scale
    ends = ends_of(model, place, settings.precision(cell), settings.evaluation_overrides(place, scale, cell, "test"))
    blocks = measure.features(model, place, scale, cell, "test")["metrics"]
    full = measure.completions(model, place, scale, cell, "test")["metrics"]
    return {**blocks, **full, **ends}


def ends_of(model: str, place: Place, precision: list[str], overrides: list[str]) -> dict[str, float]:
    """Cross-entropy of end tokens and of others, and the mean probability of an end where a text goes on."""
    import torch

    from ebft import load_config
    from ebft.data.load import load_section_of_tokens

    policy, tokenizer = measure.loaded(model, place, precision)
    rows, _ = load_section_of_tokens(
        load_config(settings.config_file("evaluation"), overrides), tokenizer, "test_datasets"
    )
    end = tokenizer.eos_token_id
    nlls: dict[str, list[float]] = {"ce_end": [], "ce_text": [], "p_end": []}
    for row in rows:
        ids = torch.tensor(row["input_ids"], device=policy.device)
        with torch.no_grad():
            logps = policy(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        for place_ in range(max(row["prompt_length"], 1), len(ids)):
            is_end = ids[place_] == end
            nlls["ce_end" if is_end else "ce_text"].append(-logps[place_ - 1, ids[place_]].item())
            if not is_end:
                nlls["p_end"].append(logps[place_ - 1, end].exp().item())
    return {name: statistics.fmean(values) for name, values in nlls.items()}


def table(folder: Any) -> str:
    """A row for each run: means over seeds, and the difference of the largest and the smallest."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(result["run"], []).append(result["metrics"])
    lines = [f"| run | seeds | {' | '.join(METRICS)} |", "| --- " * (len(METRICS) + 2) + "|"]
    for name in RUNS:
        seeds = found.get(name, [])
        cells = [[of_seed[metric] for of_seed in seeds] for metric in METRICS]
        shown = [f"{statistics.fmean(v):.4f} ({max(v) - min(v):.4f})" for v in cells if v]
        lines += [f"| {name} | {len(seeds)} | {' | '.join(shown)} |"] if seeds else []
    return "\n".join(lines)


if __name__ == "__main__":
    main()
