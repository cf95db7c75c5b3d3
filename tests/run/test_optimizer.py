"""Optimizers of other packages: the memory of their states, arguments, and resuming from a checkpoint."""

import pytest
import torch

from ebft.errors import ConfigError
from ebft.run import checks as tables
from ebft.run.checks import Machine, check_optimizer, check_runnable
from ebft.run.trainer import training_kwargs
from tests.config.conftest import make
from tests.monitor.sft_run import plain_trainer
from tests.sft.test_trainer import tiny_model

__all__ = ["make"]

WIDE = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 512, "num_key_value_heads": 2}


def trainer_with(folder, optimizer, **changes):
    keys = {"optim": optimizer, "max_steps": 4, "learning_rate": 1e-2, "save_steps": 2}
    return plain_trainer(folder, tiny_model(**WIDE), **keys, **changes)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "most"), [("adamw_torch_8bit", 2.5), ("adamw_torch_4bit", 1.4)])
def test_states_of_torchao_need_fewer_bytes_learn_the_same_and_are_restored(optimizer, most, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # takes a minute, results are the same
    whole, exact = trainer_with(tmp_path, optimizer, save_strategy="steps"), trainer_with(tmp_path / "e", "adamw_torch")
    for trainer in (whole, exact):
        trainer.train()
    assert losses(whole) == pytest.approx(losses(exact), rel=0.02)
    saved = (tmp_path / "checkpoint-2" / "optimizer.pt").stat().st_size
    assert most / 2 < saved / sum(weight.numel() for weight in whole.model.parameters()) < most
    resumed = trainer_with(tmp_path, optimizer)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole)


def test_arguments_of_the_optimizer(make, tmp_path, monkeypatch):
    """They reach it, may be text as in transformers, and are refused where that reads one as its opposite."""
    check_runnable(make(optimizer="sgd", optim_args={"momentum": 0.5}))
    trainer = trainer_with(tmp_path, "sgd", optim_args="momentum=0.5")
    assert trainer.create_optimizer().param_groups[0]["momentum"] == 0.5
    assert make(optim_args="r=4, power=0.5").optim_args == {"r": "4", "power": "0.5"}
    with pytest.warns(UserWarning, match="optim_args.eps: transformers does not read 1e-06 .* no effect; adam_epsilon"):
        check_runnable(make(optimizer="adamw_torch", optim_args={"eps": 1e-6}))
    with pytest.raises(ConfigError, match="optim_args: invalid value 'rank'; expected a mapping"):
        make(optim_args="rank")
    monkeypatch.setattr("ebft.run.checks._settings", lambda name, given: {"kahan_sum": "kahan_sum" in given or None})
    with pytest.raises(ConfigError, match="optim_args.kahan_sum: transformers does not read False"):
        check_optimizer(make(optimizer="stable_adamw", optim_args={"kahan_sum": False}))


def test_schedules_follow_the_direction_of_their_metric(make):
    machine = Machine(has_accelerator=False, supports_bf16=False)
    keys = {"lr_scheduler": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, "val_set_size": 2}
    for greater, mode in ((None, "min"), (True, "max")):
        config = make(**keys, metric_for_best_model="loss", greater_is_better=greater)
        found = training_kwargs(config, machine, 10, has_eval=True)["lr_scheduler_kwargs"]
        assert found == {"mode": mode, "patience": 0}
    with pytest.raises(ConfigError, match="lr_scheduler: constant reads no lr_scheduler_kwargs"):
        check_optimizer(make(lr_scheduler="constant", lr_scheduler_kwargs={"num_cycles": 3}))


@pytest.mark.filterwarnings("error")
def test_what_the_tables_list_can_be_created(make):
    for optimizer in tables._PLAIN:
        tables._try_optimizer(make(optimizer=optimizer))
    for schedule in tables._PLAIN_SCHEDULES:
        tables._try_schedule(make(lr_scheduler=schedule))
