"""Details that a table of cases does not show: values that are kept, tracebacks on request, files that are not run."""

import shutil

import pytest
import torch

from tests.bad_input.cases import bad, good, invoke, prepare
from tests.bad_input.models import Evil


@pytest.fixture
def run(tmp_path, tiny_llama_dir, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run_case(case):
        prepare(case, tmp_path, tiny_llama_dir)
        return invoke(case, tmp_path)

    return run_case


FAILING = """
def transform(cfg, **kwargs):
    return lambda example, tokenizer=None: example["body"], {"remove_columns": "__all__"}
"""


def test_a_pickle_in_a_checkpoint_is_not_run(run, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1}
    assert run(good("first", config=saved, trains=True)).trained
    checkpoint = tmp_path / "out" / "checkpoint-1"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        broken = tmp_path / "broken"
        shutil.copytree(checkpoint, broken)
        torch.save({"state": Evil(str(tmp_path / "pwned"))}, broken / name)
        again = bad("again", command="train run.yaml max_steps=2 resume_from_checkpoint=broken", trains=True)
        assert invoke(again, tmp_path).code != 0, name
        assert not (tmp_path / "pwned").exists()
        shutil.rmtree(broken)
