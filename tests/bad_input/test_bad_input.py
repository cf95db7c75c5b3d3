"""Every case of bad input gives one clear error, and every valid case is accepted."""

import shutil

import pytest
import torch

from tests.bad_input import data_files, models, runs
from tests.bad_input.cases import bad, complaint, good, invoke, prepare

CASES = [*data_files.CASES, *models.CASES, *runs.CASES]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case, tmp_path, tiny_llama_dir, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    prepare(case, tmp_path, tiny_llama_dir)
    assert complaint(case, invoke(case, tmp_path), tmp_path) is None


def test_a_pickle_in_a_checkpoint_is_not_run(tmp_path, tiny_llama_dir):
    first = good("first", config={"save_strategy": "steps", "save_steps": 1}, trains=True)
    prepare(first, tmp_path, tiny_llama_dir)
    assert invoke(first, tmp_path).trained
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        shutil.copytree(tmp_path / "out" / "checkpoint-1", tmp_path / name)
        torch.save({"state": models.Evil(str(tmp_path / "pwned"))}, tmp_path / name / name)
        again = bad("again", command=f"train run.yaml max_steps=2 resume_from_checkpoint={name}", trains=True)
        assert invoke(again, tmp_path).code != 0, name
        assert not (tmp_path / "pwned").exists()
