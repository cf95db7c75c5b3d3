"""Runs that end before their last step, and settings of SFT that change its losses."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from ebft import train
from tests.run.test_training import LORA, make, strided, text  # noqa: F401 - fixtures

# A learning rate that makes every evaluation after the first one worse.
WORSE = {"learning_rate": 1.0, "lr_scheduler": "constant", "max_steps": 20, "val_set_size": 4, "max_grad_norm": 100.0}


def steps(result):
    return result.trainer.state.global_step


@pytest.mark.slow
def test_evaluations_that_do_not_improve_end_a_run(make, tmp_path):  # noqa: F811
    keys = {**WORSE, "eval_steps": 2, "save_steps": 20, "early_stopping_patience": 2}
    with pytest.warns(UserWarning, match="The best evaluation was that of step .* the result is not the best model"):
        result = train(make(**keys))
    losses = [entry["eval_loss"] for entry in result.trainer.state.log_history if "eval_loss" in entry]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 and steps(result) == 2 * len(losses) < 20
    assert (tmp_path / "out" / f"checkpoint-{steps(result)}").is_dir()
    with pytest.warns(UserWarning, match="Training is already complete.*Increase early_stopping_patience"):
        train(make(**keys, auto_resume_from_checkpoints=True))
    assert steps(train(make(**{**keys, "early_stopping_patience": 3}, auto_resume_from_checkpoints=True))) >= 2 + steps(
        result
    )


def test_the_count_of_evaluations_continues_in_a_resumed_run(make, tmp_path):  # noqa: F811
    keys = {**WORSE, "eval_steps": 2, "save_steps": 2, "early_stopping_patience": 2}
    unbroken = steps(result := train(make(**keys, output_dir=tmp_path / "a")))
    best = result.trainer.state.best_global_step
    assert best < unbroken and Path(result.trainer.state.best_model_checkpoint) == tmp_path / "a" / f"checkpoint-{best}"
    own, saved = (load_file(tmp_path / "a" / part / "model.safetensors") for part in ("", f"checkpoint-{best}"))
    assert all(value.equal(saved[name]) for name, value in own.items())
    checkpoint = tmp_path / "a" / f"checkpoint-{unbroken - 2}"
    assert steps(train(make(**keys, output_dir=tmp_path / "b", resume_from_checkpoint=checkpoint))) == unbroken < 20


def test_losses_above_a_threshold_end_a_run(make):  # noqa: F811
    def ended(threshold, patience):
        return steps(train(make(max_steps=6, loss_watchdog_threshold=threshold, loss_watchdog_patience=patience)))

    assert ended(1.0, 2) == 2 and ended(1.0, None) == 3 and ended(1000.0, 1) == 6


def test_the_count_of_losses_continues_in_a_resumed_run(make, tmp_path):  # noqa: F811
    keys = {"max_steps": 8, "save_steps": 3, "loss_watchdog_threshold": 1.0, "loss_watchdog_patience": 4}
    assert steps(train(make(**keys, output_dir=tmp_path / "a"))) == 4
    checkpoint = tmp_path / "a" / "checkpoint-3"
    assert steps(train(make(**keys, output_dir=tmp_path / "b", resume_from_checkpoint=checkpoint))) == 4


def test_a_run_that_its_losses_ended_is_complete(make, tmp_path):  # noqa: F811
    keys = {"max_steps": 5, "save_steps": 100, "loss_watchdog_threshold": 1.0, "loss_watchdog_patience": 2}
    train(make(**keys))
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    with pytest.warns(UserWarning, match="already complete.*Increase loss_watchdog_threshold or loss_watchdog_pat"):
        assert steps(train(make(**keys, auto_resume_from_checkpoints=True))) == 2
    keys["loss_watchdog_patience"] = 3
    assert steps(train(make(**keys, auto_resume_from_checkpoints=True))) == 3
    keys["loss_watchdog_threshold"] = 1000.0
    assert steps(train(make(**keys, auto_resume_from_checkpoints=True))) == 5


def test_noise_of_embeddings_changes_the_loss(make):  # noqa: F811
    def loss(alpha):
        return train(make(max_steps=1, neftune_noise_alpha=alpha)).trainer.state.log_history[0]["loss"]

    assert abs(loss(None) - loss(50.0)) > 1e-3


@pytest.mark.slow
def test_the_loss_of_the_router(make, tiny_llama_dir, tmp_path):  # noqa: F811
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=512, num_key_value_heads=2, num_local_experts=4, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(tmp_path / "moe")

    def loss(**overrides):
        keys = {"base_model": tmp_path / "moe", "max_steps": 1, "overrides_of_model_config": overrides}
        return train(make(**keys)).trainer.state.log_history[0]["loss"]

    plain = loss()
    assert loss(router_aux_loss_coef=1.0) == plain
    small, large = (loss(output_router_logits=True, router_aux_loss_coef=coef) - plain for coef in (0.5, 1.0))
    assert large == pytest.approx(2 * small, rel=1e-3) and large > 1
