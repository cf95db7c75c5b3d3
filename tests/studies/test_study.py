"""The study of studies/smollm2: its runs, its data, intervals, samples, and the tables of docs/results.md."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import ends
import pytest
import report
import torch
from cells import CELLS, Study, config_file, length_of
from intervals import difference, over_seeds, spread_of_seeds, t_quantile

from ebft import load_config
from ebft.tools.quickstart import smollm2 as catalogs
from tests.structured.conftest import chat_model

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "smollm2" / "results"


def cell(group: str, seed: int, weights: tuple[float, ...] = (1.0, 3.0), **sums: list[float]) -> dict:
    task, start, method = group.split("-", 2)
    place = {"task": task, "start": start, "group": group, "seed": seed, "method": method}
    of_each = lambda values: dict.fromkeys(sums, values)
    files = [f"{number}.py" for number in range(len(weights))]
    return {"cell": place, "sums": sums, "weights": of_each(list(weights)), "files": of_each(files)}


def test_every_run_has_a_valid_config_and_what_it_needs(tmp_path):
    """Runs on translations with stored results; SFT beside EBFT with every seed; a step has sixteen documents."""
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names) == 19 and all((RESULTS / "cells" / f"{name}.json").exists() for name in names)
    seeds, study = Counter(cell.group for cell in CELLS), Study(tmp_path, RESULTS, "base", False)
    for start, count in (("base", 3), ("warm", 2)):
        assert seeds[f"translation-{start}-sft"] == seeds[f"translation-{start}-ebft-mean"] == count
    for cell in (cell for cell in CELLS if cell.method != "none"):
        steps, flops = length_of(cell, study)
        config = load_config(config_file(cell.method), study.training(cell, steps, flops))
        stored = json.loads((RESULTS / "cells" / f"{cell.name}.json").read_text())
        assert config.learning_rate == stored["learning_rate"], cell.name
        assert steps == stored["cost"]["steps"] or cell.method == "sdft", cell.name
        assert config.seed == cell.seed and config.auto_resume_from_checkpoints and config.max_steps == steps
        assert (config.lora_model_dir is not None) == (cell.start == "warm")
        assert config.budget.flops == flops and (flops is None) == (cell.method != "sdft")
        completions = config.trl.num_generations if cell.method in ("sdft", "structured") else 1
        assert config.micro_batch_size * config.gradient_accumulation_steps == 16 * completions
    config = load_config(config_file("evaluation"), study.evaluation(CELLS[0], "long"))
    assert config.ebft.generate_max_len == 64 and config.ebft.stride > config.sequence_len


def test_ends_are_those_of_plain_probabilities(chat_tokenizer):
    model = chat_model(chat_tokenizer)
    rows = [{"input_ids": [5, 6, 0], "prompt_length": 1}, {"input_ids": [9, 8], "prompt_length": 0}]
    logps = [model(torch.tensor([row["input_ids"]])).logits[0].float().log_softmax(-1) for row in rows]
    found = ends.ends_of(model, rows, 0)
    assert found["ce_end"] == pytest.approx(-logps[0][1, 0].item(), rel=1e-4)
    assert found["ce_text"] == pytest.approx(-(logps[0][0, 6] + logps[1][0, 8]).item() / 2, rel=1e-4)
    assert found["p_end"] == pytest.approx((logps[0][0, 0].exp() + logps[1][0, 0].exp()).item() / 2, rel=1e-4)


def test_the_table_of_the_results_page_is_printed_from_the_stored_results():
    cells = report.load_cells(RESULTS)
    assert len(cells) == 36 and report.main_table(cells) in (ROOT / "docs" / "results.md").read_text()
    table = report.difference_table(cells, "ebft-mean")
    assert "| translation-base-sft | +0.243 ± 0.092 | +0.0031 ± 0.0032 | -0.005 ± 0.011 | +0.026 ± 0.025 |" in table
    assert "| translation-base-sft_flops | +0.293 ± 0.048* |" in table


CATALOG = """
#. Default: "Show all of the entries"
#: app/list.py:7 app/other.py:3
msgid "label_show"
msgstr "Afficher toutes "
"les entrées"

#, fuzzy
msgid "This one is not reliable."
msgstr "Rien à voir avec cela."
"""


def test_reliable_sentences_of_catalogs_become_rows():
    [row] = catalogs.rows("app", {"a.po": CATALOG, "b.po": CATALOG})
    assert row["input"] == "English: Show all of the entries\nFrench:" and row["file"] == "app/app/list.py"
    assert row["output"] == " Afficher toutes les entrées\n"


def test_spread_of_seeds_is_students_interval():
    assert spread_of_seeds([1.0, 2.0, 3.0]) == pytest.approx(4.303 * 1 / math.sqrt(3))
    assert math.isnan(spread_of_seeds([1.0])), "one seed says nothing of others"
    assert spread_of_seeds([0.1, 0.1, 0.1]) == 0.0
    for degrees, quantile in ((2, 4.303), (11, 2.201), (15, 2.131), (20, 2.086), (10**6, 1.960)):
        assert t_quantile(degrees) == pytest.approx(quantile, abs=0.001), degrees


def test_differences_are_paired_by_seed_and_document():
    cells = [cell("raw-base-sft", seed, ce=[seed + 1.0, 9.0 * seed]) for seed in range(3)]
    cells += [cell("raw-base-ebft-centre", seed, ce=[seed + 0.5, 9.0 * seed - 1.5]) for seed in range(3)]
    found = difference(cells, "raw-base-ebft-centre", "raw-base-sft", "ce")
    assert (found.mean, found.seeds) == (-0.5, 0.0), "the seeds' own spread is no part of it"
    assert found.files == pytest.approx(0.0), "nor is that of documents"
    assert over_seeds(cells, "raw-base-sft", "ce").half > 1
    found = difference([cells[0], cells[1], cells[4], cells[5]], "raw-base-ebft-centre", "raw-base-sft", "ce")
    assert found.count == 1 and math.isnan(found.half), "only seeds of both sides count"
    cells += [cell("raw-base-none", 0, ce=[4.0, 9.0])]
    found = difference(cells, "raw-base-sft", "raw-base-none", "ce")
    assert (found.mean, found.count) == (-0.5, 3), "a start is the other side of every seed"
    found = over_seeds(cells, "raw-base-none", "ce")
    assert found.seeds == 0.0 and found.half == found.files > 0


@pytest.mark.slow
def test_the_study_runs_at_a_scale_of_minutes_and_goes_on_where_it_was(tmp_path):
    """SFT at the FLOPs of EBFT is long enough, a lost result is measured again on the model that is there."""
    of_base = ["none", "sft-", "ebft-mean-", "sft_flops", "sdft", "structured"]
    names = [*(f"translation-base-{method}*" for method in of_base), "translation-warm-sft*"]
    command = [sys.executable, "studies/smollm2/run.py", "--scale", "tiny", "--output", str(tmp_path), "--only", *names]
    start = lambda: subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=900)
    first = start()
    assert first.returncode == 0, first.stdout + first.stderr
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results" / "cells").iterdir()}
    for name, result in found.items():
        wanted = {"ce_loss", "cfm_loss", "alignment", "diversity", "cfm_loss_long", "chrf_greedy", "distinct"}
        assert wanted <= set(result["per_document"]) and result["documents"] and result["machine"]["commit"], name
        assert result["command"] == f"python studies/smollm2/run.py --scale tiny --only {name}"
    sft, ebft = (found[f"translation-base-{name}-seed2"]["cost"] for name in ("sft_flops", "ebft-mean"))
    assert sft["flops"] == pytest.approx(ebft["flops"], rel=0.5) and sft["steps"] > 2
    lost = tmp_path / "results" / "cells" / "translation-base-ebft-mean-seed0.json"
    lost.unlink()
    assert start().stdout.count("results/cells") == 1
    assert json.loads(lost.read_text())["metrics"] == found[lost.stem]["metrics"]
    assert json.loads(lost.read_text())["learning_rate"] == 0.001
