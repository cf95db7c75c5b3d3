"""Benchmarks as a user runs them, at the size of a test."""

import json

import pytest

from benchmarks import precision, sft_packing, shared_prompt


def run(benchmark, folder, *arguments):
    """The stored result of a benchmark."""
    output = folder / "result.json"
    benchmark.main([*arguments, "--output", str(output)])
    result = json.loads(output.read_text(encoding="utf-8"))
    assert {"commit", "device", "torch", "transformers"} <= set(result["card"])
    return result


def test_all_ways_of_packing_run_on_the_same_documents(tmp_path):
    arguments = ("--tiny", "--length", "48", "--documents", "12", "--rows", "4", "--repeats", "1")
    padded, packed, flattened = run(sft_packing, tmp_path, *arguments)["ways"]
    assert padded["padding"] > packed["padding"] >= flattened["padding"] == 0 and padded["ratio"] == 1


def test_a_shared_prompt_has_the_gradients_of_rows(tmp_path):
    [row] = run(shared_prompt, tmp_path, "--tiny", "--preset", "7m", "--repeats", "1")["shapes"]
    assert row["gradient_difference"] < 1e-3 and min(*row["seconds"].values(), *row["rollout_seconds"].values()) > 0


@pytest.mark.slow
def test_precisions_are_compared_on_the_same_rollouts(tmp_path):
    result = run(precision, tmp_path, "--tiny", "--length", "40", "--repeats", "1")
    rows = {(row["tuning"], row["precision"]): row for row in result["precisions"]}
    assert len(rows) == 10 and all(row["gradient_cosine"] > 0.9 for row in rows.values())
    for tuning in ("full", "LoRA"):
        errors = {name: row["logps_nats"] for (of, name), row in rows.items() if of == tuning}
        assert errors["float32"] == 0 < errors["mixed"] < errors["bfloat16, rounded logits"] < 0.01
        for name in ("mixed", "bfloat16"):
            assert errors[name] != errors[f"{name}, rounded logits"] and rows[tuning, name]["ratio"] > 0
