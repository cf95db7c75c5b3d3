"""What commands write to stderr: progress bars in terminals only, messages on separate lines, the summary of a run."""

import shlex
import subprocess
import sys

import pytest

from tests.cli.conftest import ENVIRONMENT


@pytest.mark.slow
def test_a_run_in_a_pipe_writes_lines_without_progress_bars(run_file, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() + '\n{"input": "nothing", "output": ""}')
    lora = ["adapter=lora", "lora_r=2", "lora_alpha=4", "lora_target_linear=true", "dataset_prepared_path="]
    keys = [*lora, "max_steps=2", "val_set_size=2", "eval_steps=1", "logging_steps=1", f"output_dir={tmp_path / 'out'}"]
    done = in_shell(["train", str(run_file), *keys])
    assert done.returncode == 0, done.stderr
    for written in (done.stdout, done.stderr):
        assert not any(sign in written for sign in ("\r", "it/s", "s/it", "%|"))
    assert "step 1/2" in done.stdout and done.stdout.count("eval_ features are not whitened") == 1
    lines = done.stderr.split("\n")
    assert any(line.startswith("datasets: 13 documents") and line.endswith("train, row 12)") for line in lines)
    first = lines.index("Method: ebft strided")
    model, data, steps, adapter = lines[first + 1 : first + 5]
    assert model.endswith(" parameters trained, float32") and " of " in model
    assert data == "Data: 11 training rows, 1 held out"  # the dropped row is one of the two held out
    assert steps.startswith("Steps: 2 (") and steps.endswith(f"; output in {tmp_path / 'out'}")
    assert adapter.startswith("Adapter: LoRA on 14 modules: down_proj (2), gate_proj (2), k_proj (2), ")


def test_the_log_level_applies_to_all_libraries():
    code = "from ebft.tools.cli import app; import sys; sys.argv = ['ebft', 'config', 'tui'];\n"
    code += "try: app()\nfinally:\n import logging, os, transformers\n"
    code += " print(logging.getLogger().level, transformers.logging.get_verbosity(), os.environ.get('EBFT_DEBUG'))"
    environment = {**ENVIRONMENT, "AXOLOTL_LOG_LEVEL": "DEBUG"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "10 10 1"


def in_shell(words, redirection=""):
    command = f"set -o pipefail; {sys.executable} -m ebft {shlex.join(words)} {redirection}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT)


@pytest.mark.parametrize(("redirection", "status", "unbuffered"), [  # with the exit status of a listing command
    ("| head -1", 141, ""), ("> /dev/full", 1, "1"),
    pytest.param("2> /dev/full", 0, "1", marks=pytest.mark.slow),
])  # fmt: skip
def test_listings_end_quietly_if_nobody_reads_them(redirection, status, unbuffered, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PYTHONUNBUFFERED", unbuffered)
    done = in_shell(["config"], redirection)
    said = "Error: The standard output cannot be written: " if status == 1 else ""
    assert done.returncode == status and done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["| head -1", "> /dev/full 2>&1"])
def test_training_goes_on_without_its_output(run_file, tmp_path, redirection):
    keys = ["max_steps=3", "save_strategy=steps", "save_steps=2", f"output_dir={tmp_path / 'out'}"]
    done = in_shell(["train", str(run_file), *keys], redirection)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "checkpoint-2").is_dir() and (tmp_path / "out" / "model.safetensors").is_file()
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) >= 3
    if redirection == "| head -1":
        assert done.stderr.count("Broken pipe. The command continues without it.") == 1
