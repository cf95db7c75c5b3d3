"""The benchmark at a size that takes seconds; the published trainer takes part where EBFT_AXOLOTL_WHEEL names it."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks.flops import counted_flops
from benchmarks.measuring import with_peak_memory
from benchmarks.strided_step import main

pytestmark = pytest.mark.slow

WHEEL = os.environ.get("EBFT_AXOLOTL_WHEEL")
PHASES = ("rollout", "features", "forward", "backward")


@pytest.fixture(scope="module", autouse=True)
def small_matrices():
    """The rate of a large matrix product is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.measuring.GEMM_SIZE", {"cpu": 256, "cuda": 256})
        yield


def run(output: Path, *arguments: str) -> tuple[dict, str]:
    """The benchmark in this process: its JSON line, and everything that it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["--tiny", "--repeats", "1", "--output", str(output), *arguments])
    return json.loads(printed.getvalue().splitlines()[-1]), printed.getvalue()


def test_what_is_measured_adds_up(tmp_path):
    output = tmp_path / "results.json"
    lengths = ("--lengths", "24", "40", "--alone", "64", "--dtypes", "float32", "bfloat16", "--variant-lengths", "40")
    extra = ("--overhead-steps", "4", "--overhead-length", "32", "--recompile-steps", "2")
    results, printed = run(output, *lengths, *extra, "--wheel", "missing.whl")
    assert json.loads(output.read_text()) == results and "ours bfloat16 / ours: " in printed
    variants = ["ours", "ours bfloat16", "ours second forward"]
    assert [list(entry["sides"]) for entry in results["lengths"]] == [["ours"], variants, ["ours"]]
    for entry in results["lengths"]:
        assert entry["generated"] == entry["blocks"] * 4 * 8
        for row in entry["sides"].values():
            assert row["rounds"] == 1 and row["failed"] is None
            assert sum(row[phase] for phase in PHASES) == pytest.approx(row["step"], rel=1e-3)
            assert all(row[phase] > 0 for phase in PHASES)
            assert row["step_over_floor"] == pytest.approx(row["step"] / row["floor"], rel=1e-3)
            assert row["counted_gflop"] >= 0.9 * sum(entry["needed_gflop"].values()) > 0
            assert row["peak_mib"] is None or row["peak_mib"] > 0
    assert results["train"]["whole"] > results["train"]["inside"] > 0 and "ebft train at 32 tokens" in printed
    assert results["recompilations"]["frames"] == {"ours": 0, "ours bfloat16": 0, "ours second forward": 0}


@pytest.mark.skipif(WHEEL is None, reason="needs EBFT_AXOLOTL_WHEEL, the wheel of axolotl 0.19.0")
@pytest.mark.parametrize("preset", ["7m", "1b"])
def test_the_published_trainer_steps_beside_ours(tmp_path, preset):
    arguments = ("--preset", preset, "--lengths", "24", "--overhead-steps", "0", "--recompile-steps", "0")
    results, printed = run(tmp_path / "out.json", *arguments, "--wheel", WHEEL)
    row = results["lengths"][0]["sides"]["axolotl"]
    assert row["failed"] is None and sum(row[phase] for phase in PHASES) == pytest.approx(row["step"], rel=1e-3)
    assert results["card"]["axolotl"] == "0.19.0" and "axolotl / ours: " in printed


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_is_counted(is_causal):
    query = torch.randn(1, 2, 10, 8, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    flops = counted_flops(lambda: attend(query, query, query, is_causal=is_causal).sum().backward())
    pairs = 10 * 11 // 2 if is_causal else 10 * 10
    assert flops == (2 + 5) * 2 * 2 * pairs * 8


def test_peak_memory_is_what_was_taken_in_between():
    _, mib = with_peak_memory(lambda: torch.ones(64 * 2**18) + 1, torch.device("cpu"))
    assert mib is None or 120 < mib < 160  # two tensors of 64 MiB
