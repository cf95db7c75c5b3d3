"""`ebft evaluate` as a user runs it."""

import json
import math

import pytest

from tests.cli.conftest import plain


@pytest.mark.slow
def test_two_models_side_by_side(ebft, write_config, models, tmp_path):
    output, plot = tmp_path / "new" / "result.json", tmp_path / "new" / "plots.png"
    result = ebft(
        "evaluate",
        write_config("strided"),
        "evaluation.max_new_tokens=4",
        "--model",
        models / "base",
        "--model",
        models / "adapter",
        "--metric",
        "tests.evaluation.metrics.length",
        "--output",
        output,
        "--plot",
        plot,
    )
    assert result.exit_code == 0, result.output
    table = plain(result.output)
    for name in ("ce_loss v", "perplexity v", "cfm_loss v", "alignment ^", "length_greedy ^", "reward_pass@3 ^"):
        assert name in table
    assert "Differences from" in table
    found = json.loads(output.read_text())
    assert [entry["model"] for entry in found["models"]] == [str(models / "base"), str(models / "adapter")]
    for entry in found["models"]:
        for name in ("ce_loss", "perplexity", "cfm_loss", "cfm_loss_plugin", "cfm_loss_whitened", "alignment"):
            assert math.isfinite(entry["metrics"][name])
            low, high = entry["intervals"][name]
            assert low <= entry["metrics"][name] <= high
    assert found["settings"]["documents"] == 9 and found["settings"]["samples"] == 3
    assert found["machine"]["torch"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_adapter_on_a_gguf_file(ebft, write_config, tiny_gguf, tmp_path):
    """Its adapter_config names the file, so it can be measured with the config of its run and with another."""
    config = write_config("strided")
    gguf = [f"base_model={tiny_gguf.parent}", f"gguf_file={tiny_gguf.name}"]
    lora = ["adapter=lora", "lora_r=4", "lora_alpha=8", "lora_target_linear=true", "max_steps=1"]
    result = ebft("train", config, *gguf, *lora, f"output_dir={tmp_path / 'run'}")
    assert result.exit_code == 0, result.output + result.stderr
    assert "config file" not in result.stderr
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tiny_gguf
    )
    found = []
    for base in (gguf, [f"base_model={tiny_gguf}"], []):
        output = tmp_path / "result.json"
        models = ["--model", tiny_gguf, "--model", tmp_path / "run"]
        result = ebft("evaluate", config, *base, "evaluation.max_new_tokens=4", *models, "--output", output)
        assert result.exit_code == 0, result.output + result.stderr
        found.append([entry["metrics"]["ce_loss"] for entry in json.loads(output.read_text())["models"]])
        named = json.loads(output.read_text())["settings"]["base_model"]
        assert named.endswith(".gguf") == bool(base), "the file, not its folder, is the feature space"
    assert found[0] == pytest.approx(found[1], abs=1e-6) and found[0] == pytest.approx(found[2], abs=1e-6)


def test_what_was_measured_before_a_model_failed_is_kept(ebft, write_config, models, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "base")
    model.lm_head.weight.data[7] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    output = tmp_path / "result.json"
    names = ["--model", models / "base", "--model", tmp_path / "broken"]
    result = ebft("evaluate", write_config("strided"), *names, "--output", output)
    assert result.exit_code == 2 and "broken: base_model: " in plain(result.stderr)
    assert "the weights contain NaN" in plain(result.stderr)
    assert [entry["model"] for entry in json.loads(output.read_text())["models"]] == [str(models / "base")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "./nothing/here"], "the local path './nothing/here' does not exist"),
        (["--metric", "tests.evaluation.metrics.nothing"], "has no function 'nothing'"),
        (["--output", "/proc/nowhere/result.json"], "cannot write"),
        (["evaluation.sample=3"], "Did you mean"),
    ],
)
def test_errors_end_in_one_line(arguments, message, ebft, write_config):
    result = ebft("evaluate", write_config("strided"), *arguments)
    assert result.exit_code == 2 and message in plain(result.output + result.stderr)
    assert "Traceback" not in result.output
