"""What a run logs of its held-out data is what `ebft evaluate` finds of the model that it saved."""

import pytest

from ebft import evaluate, load_config, train

LORA = ["adapter=lora", "lora_target_linear=true", "lora_r=4", "lora_alpha=8"]
SHORT = ["max_steps=1", "eval_steps=1", "logging_steps=1", "learning_rate=0.001", "save_strategy=no", "bf16=false"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strided", "texts", "plain"])
def test_token_rows(kind, write_config):
    adapter = LORA if kind == "strided" else []
    config = load_config(write_config(kind), [*SHORT, "eval_batch_size=4", *adapter])
    logged = train(config).metrics
    (result,) = evaluate(config, [config.output_dir]).models
    for name in config.method.held_out_metrics(config):
        assert f"eval_{name}" in logged
        if name != "loss":
            assert logged[f"eval_{name}"] == pytest.approx(result.metrics[name], abs=2e-5, rel=2e-5), name
    if kind == "plain":
        assert logged["eval_ce_loss"] == pytest.approx(logged["eval_loss"], rel=0.05)


def test_prompts(write_config):
    """Cross-entropies are equal; samples are drawn by other means, so what is made of them is near."""
    config = load_config(write_config("structured"), [*SHORT, "micro_batch_size=3", "trl.temperature=1.0"])
    logged = train(config).metrics
    (result,) = evaluate(config, [config.output_dir]).models
    for name in ("ce_loss", "perplexity", "ce_loss_all", "perplexity_all"):
        assert logged[f"eval_{name}"] == pytest.approx(result.metrics[name], rel=1e-4), name
    for name in config.method.held_out_metrics(config):
        assert f"eval_{name}" in logged
    low, high = result.intervals["cfm_loss"]
    assert low - 0.1 < logged["eval_cfm_loss"] < high + 0.1
    assert logged["eval_alignment"] < logged["eval_alignment_pass@3"]
