"""`ebft train` in two processes: the numbers of one process, a stop by SIGTERM, resuming, and one error."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ENVIRONMENT, ebft, plain
from tests.launch.plugins import STEP
from tests.serving.processes import free_port

pytestmark = pytest.mark.slow

__all__ = ["ebft"]

ROOT = Path(__file__).parents[2]
COMPARED = ("loss", "grad_norm", "ebft/alignment", "ebft/cfm_loss", "ebft/ce_loss", "budget/documents", "eval_ce_loss")


@pytest.fixture
def run_file(tiny_llama_dir, tmp_path):
    words = "energy based fine tuning matches the features of samples and references"
    rows = [{"text": " ".join(f"{word}{index}" for word in words.split())} for index in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    config = {
        "base_model": str(tiny_llama_dir),
        "rl": "ebft",
        "ebft": {"mode": "strided", "stride": 8, "context_length": 4, "generate_max_len": 2, "n_samples_per_prompt": 2},
        "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "ebft_pretrain.transform"}],
        "val_set_size": 2,
        "sequence_len": 32,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "torch_dtype": "float32",
        "auto_resume_from_checkpoints": True,
    }
    path.write_text(json.dumps(config))
    return path


def train(run_file, out, *words):
    """`ebft train` in two processes with one row each."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    unset = ("LOCAL_RANK", "WORLD_SIZE", "RANK")
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in unset}
    command = [sys.executable, "-m", "ebft", "train", run_file, f"output_dir={out}", "micro_batch_size=1"]
    return subprocess.run(
        [*map(str, command), "--num-processes", "2", *words],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_processes_with_different_configs_are_refused(run_file, tmp_path):
    rank = {
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "ebft", "train", str(run_file), f"output_dir={tmp_path / 'out'}"]
    started = [
        subprocess.Popen(
            [*command, f"learning_rate={rate}"],
            env={**ENVIRONMENT, **rank, "PYTHONPATH": path, "RANK": str(place), "LOCAL_RANK": str(place)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place, rate in enumerate((0.01, 0.1))
    ]
    for process in started:
        printed = plain(process.communicate(timeout=300)[1])
        assert process.returncode == 2 and "rank 1 differs from rank 0 in learning_rate." in printed, printed


def test_modules_that_fsdp_cannot_shard_are_one_error(run_file, tmp_path):
    key = "fsdp_config.transformer_layer_cls_to_wrap=Bogus"
    failed = train(run_file, tmp_path / "out", "fsdp=true", key)
    printed = plain(failed.stderr)
    assert failed.returncode == 2 and "Traceback" not in printed, printed
    assert printed.count("Error: fsdp_config.transformer_layer_cls_to_wrap: the model has no module of") == 1, printed


def logged(out):
    """The logged values of each step."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for line in lines:
        found.setdefault(line["step"], {}).update(line)
    return found


def test_a_stopped_and_resumed_run_of_two_processes_equals_one_process(ebft, run_file, tmp_path):
    stopped = train(run_file, tmp_path / "two", "plugins=[tests.launch.plugins.StopsLaunch]")
    assert stopped.returncode == 143, stopped.stderr
    assert stopped.stderr.count("Stopping after this step") == 1
    assert stopped.stderr.count(f"Stopped at step {STEP}") == 1 and "Traceback" not in stopped.stderr
    assert [path.name for path in (tmp_path / "two").glob("checkpoint-*")] == [f"checkpoint-{STEP}"]
    resumed = train(run_file, tmp_path / "two", "--launcher", "torchrun")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("Model saved in") == 1

    one = ebft("train", run_file, f"output_dir={tmp_path / 'one'}", "micro_batch_size=2", "--launcher", "python")
    assert one.exit_code == 0, one.stderr
    ours, theirs = logged(tmp_path / "two"), logged(tmp_path / "one")
    assert sorted(ours) == sorted(theirs) and {1, STEP, 4} <= set(ours)
    compared = [(step, key) for step in theirs for key in COMPARED if key in theirs[step]]
    assert {key for _, key in compared} == set(COMPARED)
    for step, key in compared:
        assert ours[step][key] == pytest.approx(theirs[step][key], abs=1e-5, rel=1e-5), (step, key)


def test_an_error_in_one_process_is_printed_once(run_file, tmp_path):
    failed = train(
        run_file, tmp_path / "out", "plugins=[tests.launch.plugins.FailsOnRankOne]", "--launcher", "torchrun"
    )
    printed = plain(failed.stderr)
    assert failed.returncode == 2, printed
    assert len(re.findall(r"\bError: ", printed)) == 1 and "ValueError: rank one is broken (" in printed
    assert "Traceback" not in printed and "ChildFailedError" not in printed
