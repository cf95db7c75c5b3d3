"""`ebft evaluate` as a user runs it."""

import json

import pytest

from tests.cli.conftest import plain


@pytest.mark.slow
def test_two_models_side_by_side(ebft, write_config, models, tmp_path):
    output, plot = tmp_path / "new" / "result.json", tmp_path / "new" / "plots.png"
    compared = ("--model", models / "base", "--model", models / "adapter")
    options = ("--metric", "tests.evaluation.metrics.length", "--output", output, "--plot", plot)
    result = ebft("evaluate", write_config("strided"), "evaluation.max_new_tokens=4", *compared, *options)
    assert result.exit_code == 0, result.output
    names = ("ce_loss v", "perplexity v", "cfm_loss v", "length_greedy ^", "reward_pass@3 ^", "Differences from")
    assert [name for name in names if name not in plain(result.output)] == []
    found = json.loads(output.read_text())
    assert [entry["model"] for entry in found["models"]] == [str(models / "base"), str(models / "adapter")]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_before_a_model_failed_is_kept(refused, write_config, models, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "base")
    model.lm_head.weight.data[7] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    output = tmp_path / "result.json"
    assert "/ is not writable" in refused("evaluate", write_config("strided"), "--output", "/")
    names = ["--model", models / "base", "--model", tmp_path / "broken"]
    said = refused("evaluate", write_config("strided"), *names, "--output", output)
    assert "broken: base_model: " in said and "the weights contain NaN" in said
    assert [entry["model"] for entry in json.loads(output.read_text())["models"]] == [str(models / "base")]
