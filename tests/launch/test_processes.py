"""`ebft train` in two processes: the numbers of one process, a stop by SIGTERM, resuming, and one error."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ENVIRONMENT, plain
from tests.launch.plugins import STEP
from tests.serving.processes import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMPARED = ("loss", "grad_norm", "ebft/alignment", "ebft/cfm_loss", "ebft/ce_loss", "budget/documents", "eval_ce_loss")


@pytest.fixture
def run_file(tiny_llama_dir, tmp_path):
    words = "energy based fine tuning matches the features of samples and references"
    rows = [{"text": " ".join(f"{word}{index}" for word in words.split())} for index in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampled = {"stride": 8, "context_length": 4, "generate_max_len": 2, "n_samples_per_prompt": 2}
    config = {"base_model": str(tiny_llama_dir), "rl": "ebft", "ebft": {"mode": "strided", **sampled}}
    config |= {"datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "ebft_pretrain.transform"}]}
    config |= {"val_set_size": 2, "sequence_len": 32, "gradient_accumulation_steps": 1, "max_steps": 4}
    config |= {"learning_rate": 1e-2, "torch_dtype": "float32", "auto_resume_from_checkpoints": True}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    return tmp_path / "run.yaml"


UNSET = ("LOCAL_RANK", "WORLD_SIZE", "RANK", "RAY_ADDRESS")
OF_PROCESSES = {name: value for name, value in ENVIRONMENT.items() if name not in UNSET}
OF_PROCESSES |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def command(run_file, out, *words):
    given = sys.executable, "-m", "ebft", "train", run_file, f"output_dir={out}", "micro_batch_size=1", *words
    return [str(word) for word in given]


def train(run_file, out, *words):
    """`ebft train` in two processes with one row each."""
    words = command(run_file, out, "--num-processes", "2", *words)
    return subprocess.run(words, env=OF_PROCESSES, cwd=out.parent, capture_output=True, text=True, timeout=600)


def test_processes_with_different_configs_are_refused(run_file, tmp_path):
    ranks = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank, rate in enumerate((0.01, 0.1)):
        environment = OF_PROCESSES | ranks | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        words = command(run_file, tmp_path / "out", f"learning_rate={rate}")
        started.append(subprocess.Popen(words, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
    for process in started:
        printed = plain(process.communicate(timeout=300)[1])
        assert process.returncode == 2 and "rank 1 differs from rank 0 in learning_rate." in printed, printed


@pytest.mark.parametrize(("words", "message"), [
    ("fsdp=true fsdp_config.transformer_layer_cls_to_wrap=Bogus", "Could not find the transformer layer class Bogus"),
    ("plugins=[tests.launch.plugins.FailsOnRankOne] --launcher torchrun", "ValueError: rank one is broken ("),
])  # fmt: skip
def test_an_error_of_one_or_all_processes_is_printed_once(run_file, tmp_path, words, message):
    failed = train(run_file, tmp_path / "out", *words.split())
    printed = plain(failed.stderr)
    assert failed.returncode == 1 and "Traceback" not in printed and "ChildFailedError" not in printed, printed
    assert len(re.findall(r"Error: ", printed)) == 1 and printed.count(message) == 1, printed


def logged(out):
    """The logged values of each step."""
    found = {}
    for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        found.setdefault(line["step"], {}).update(line)
    return found


def assert_same_numbers(ours, theirs, tolerance=1e-5):
    """The logged values of each step are the same."""
    assert sorted(ours) == sorted(theirs) and {1, STEP, 4} <= set(ours)
    compared = [(step, key) for step in theirs for key in COMPARED if key in theirs[step]]
    assert {key for _, key in compared} == set(COMPARED)
    for step, key in compared:
        assert ours[step][key] == pytest.approx(theirs[step][key], abs=tolerance, rel=tolerance), (step, key)


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
    assert_same_numbers(logged(tmp_path / "two"), logged(tmp_path / "one"))
