"""The benchmark of freed memory, as a user runs it, at the size of a test."""

import json
import platform

import pytest
import torch

from benchmarks.freed_memory import main

pytestmark = [
    pytest.mark.slow,  # two processes that import torch
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc"),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="the setting is for training on CPU"),
]


def test_both_ways_run_in_processes_of_their_own(tmp_path, capsys):
    output = tmp_path / "result.json"
    main(["--tiny", "--rounds", "1", "--output", str(output)])
    result = json.loads(output.read_text(encoding="utf-8"))
    default, kept = (result["ways"][way] for way in ("default", "kept"))
    assert kept["page_faults"] < default["page_faults"]  # how much depends on the layout of the heap
    assert result["ratio"] == pytest.approx(kept["seconds"] / default["seconds"], rel=1e-4)
    assert {"commit", "device", "torch", "transformers", "lengths"} <= set(result["card"])
    assert "x the CPU time" in capsys.readouterr().out
