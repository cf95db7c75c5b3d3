"""The study of studies/smollm2: its runs, its data, intervals, samples, and the tables of docs/results.md."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import data
import ends
import numpy as np
import pytest
import report
import run
import torch
from cells import CELLS, Study, config_file, length_of
from intervals import Measured, difference, over_seeds, spread_of_files, spread_of_seeds, t_quantile
from measure import Sampler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ebft import load_config
from ebft.tools.quickstart import smollm2 as catalogs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "smollm2" / "results"
PROMPTS = ["def f(x):", "a longer prompt than the other one:", "x", "def g(y, z): return"]


@cache
def tokenizer_of() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token for each byte, an end token and padding."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<end>", "<pad>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def cell(group: str, seed: int, weights: tuple[float, ...] = (1.0, 3.0), **sums: list[float]) -> dict:
    task, start, method = group.split("-", 2)
    place = {"task": task, "start": start, "group": group, "seed": seed, "method": method}
    of_each = lambda values: dict.fromkeys(sums, values)
    files = [f"{number}.py" for number in range(len(weights))]
    return {"cell": place, "sums": sums, "weights": of_each(list(weights)), "files": of_each(files)}


def measured(sums, weights=None, files=None) -> Measured:
    weights = [1.0] * len(sums) if weights is None else weights
    return Measured(list(sums), list(weights), [str(i) for i in range(len(sums))] if files is None else files)


def study_in(folder: Path, is_tiny: bool = False) -> Study:
    return Study(folder, folder / "results", "base", is_tiny)


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


def test_ends_are_those_of_plain_probabilities(model):
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


def test_results_on_other_documents_are_errors(tmp_path):
    """Neither a table nor a run may mix results on documents that differ."""
    study = study_in(tmp_path)
    for part in ("train", "warm", "validation", "test", "long"):
        data.write_rows(study.data(part), [{"input": part, "output": "x", "file": "a/b"}])
    made_from = data.make_data(study)
    assert data.make_data(study) == made_from, "documents.json is written once"
    data.write_rows(study.data("test"), [{"input": "other", "output": "x", "file": "a/b"}])
    with pytest.raises(ValueError, match="translation_test in .*: other documents"):
        data.make_data(study)
    result = {"cell": {}, "documents": {"translation_test": "other"}, "measured_on": {}, "per_document": {}}
    run.write_result(study.results / "cells" / "a.json", result)
    with pytest.raises(ValueError, match=r"a.json was measured on other documents"):
        report.load_cells(study.results)


def test_no_two_parts_share_a_file_or_a_text(tmp_path):
    found = data.translations(study_in(tmp_path, is_tiny=True), len)
    assert [len(found[part]) for part in ("train", "warm", "validation", "test", "long")] == [6, 2, 2, 2, 1]  # halves
    for column in ("file", "input"):
        values = [{row[column] for row in found[part]} for part in ("train", "warm", "validation", "test")]
        assert len(set().union(*values)) == sum(map(len, values)), column


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


def test_spread_of_files_is_that_of_resampling_them():
    """Files of one to four documents that are alike, of unequal weights, some of them 0."""
    generator = np.random.default_rng(0)
    files = np.repeat(np.arange(120), generator.integers(1, 5, size=120))
    weights = generator.integers(0, 30, size=len(files)).astype(float)
    sums = weights * (generator.normal(2.0, 0.7, size=120)[files] + generator.normal(0.0, 0.2, size=len(files)))
    by_file = [np.bincount(files, values, minlength=120) for values in (sums, weights)]
    draws = generator.integers(0, 120, size=(20_000, 120))
    resampled = by_file[0][draws].sum(1) / by_file[1][draws].sum(1)
    found = spread_of_files(measured(sums, weights, [str(file) for file in files]))
    assert found == pytest.approx(1.98 * resampled.std(), rel=0.03)
    assert found > 1.3 * spread_of_files(measured(sums, weights)), "documents of one file are no independent evidence"
    assert math.isnan(spread_of_files(measured([1.0, 2.0], files=["a", "a"])))


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


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer_of()), **shape, num_key_value_heads=1, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def sampler(model, **settings) -> Sampler:
    return Sampler(model, tokenizer_of(), **{"max_new_tokens": 24, **settings})


def test_greedy_completions_are_those_of_generate(model):
    tokenizer = tokenizer_of()
    found = sampler(model, rows=3).complete(PROMPTS, 1, 0.0)
    for prompt, (text,) in zip(PROMPTS, found):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert text == sampler(model).text(wanted[0, ids.shape[1] :].tolist())


def test_noise_belongs_to_prompt_and_sample(model):
    """Not to the other rows of the batch, nor to those that have left it."""
    alone, together = (sampler(model, rows=rows).complete(PROMPTS, 3, 1.0) for rows in (1, 64))
    assert alone == together and len({text for texts in together for text in texts}) > 4


def test_a_completion_ends_with_its_line_or_its_end_token(model):
    tokenizer = tokenizer_of()
    ids = [*tokenizer(" Le fichier")["input_ids"], tokenizer.eos_token_id]
    assert sampler(model)._has_ended(ids) and sampler(model).text(ids) == " Le fichier"
    assert sampler(model).text(tokenizer(" Le fichier\nEnglish: next")["input_ids"]) == " Le fichier\n"


@pytest.mark.slow
def test_the_study_runs_at_a_scale_of_minutes_and_goes_on_where_it_was(tmp_path):
    """SFT at the FLOPs of EBFT is long enough, a lost result is measured again on the model that is there."""
    names = [
        f"translation-base-{method}" for method in ("none", "sft-*", "ebft-mean-*", "sft_flops", "sdft", "structured")
    ]
    names = [f"{name}*" for name in (*names, "translation-warm-sft")]
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
