"""Training with prepared rows gives what training without them gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ebft import train


def losses(result):
    keys = ("loss", "grad_norm", "eval_ce_loss", "eval_cfm_loss", "reward")
    return [{key: entry[key] for key in keys if key in entry} for entry in result.trainer.state.log_history]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["packed", "structured"])
def test_losses_are_the_same(make, tmp_path, capsys, method):
    base = tmp_path / "prepared"
    direct = losses(train(make(method)))
    assert not base.exists()
    lines = []
    for _ in range(2):
        capsys.readouterr()
        assert losses(train(make(method, dataset_prepared_path=str(base)))) == direct
        lines += [line for line in capsys.readouterr().err.splitlines() if "prepared rows" in line]
    folder = next(path for path in base.iterdir() if path.is_dir())
    assert [line.partition(" ")[0] for line in lines] == ["Stored", "Using"]
    assert all(f"prepared rows in {folder}: " in line and " for evaluation" in line for line in lines)


@pytest.mark.slow
def test_one_of_two_processes_stores_the_rows(make, tmp_path):
    base, file = tmp_path / "prepared", tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(make("sft", dataset_prepared_path=str(base)).model_dump(exclude_unset=True)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "ebft", "train", str(file)]
    source = Path(__file__).parents[3] / "src"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len([path for path in base.iterdir() if path.is_dir()]) == 1
    assert done.stderr.count("prepared rows in") == 1
