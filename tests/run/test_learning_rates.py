"""Learning rates of single parameters, in the optimizer of a run."""

import pytest

from ebft import train
from ebft.errors import ConfigError, ModelError
from ebft.run.trainer import rates_of
from tests.run.test_training import LORA, make, strided, text, weights  # noqa: F401 - fixtures


def rates(trainer):
    """The peak learning rate of each trained parameter, and the weight decay of its group."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    return {
        names[id(value)]: (group["initial_lr"], group["weight_decay"]) for group in groups for value in group["params"]
    }


def test_groups_embeddings_and_everything_else(make):  # noqa: F811
    groups = [{"name": "first", "modules": ["layers.0.mlp", "norm.weight"], "lr": 0.5}]
    keys = {"lr_groups": groups, "embedding_lr": 0.25, "weight_decay": 0.1, "max_steps": 1}
    trainer = train(make(**keys)).trainer
    found = rates(trainer)
    assert len(found) == 21
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged == [1e-3]  # and not that of a group
    assert found["model.layers.0.mlp.up_proj.weight"] == (0.5, 0.1) and found["model.norm.weight"] == (0.5, 0.0)
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (0.25, 0.1)
    assert found["model.layers.1.mlp.up_proj.weight"] == (1e-3, 0.1)
    scaled = rates(train(make(embedding_lr_scale=3.0, max_steps=1)).trainer)
    assert scaled["lm_head.weight"] == (pytest.approx(3e-3), 0.0)
    assert scaled["model.norm.weight"] == (1e-3, 0.0)


def test_lora_plus(make):  # noqa: F811
    keys = {**LORA, "loraplus_lr_ratio": 16.0, "lora_modules_to_save": ["lm_head"], "embedding_lr": 0.25}
    found = rates(train(strided(make, **keys, max_steps=1)).trainer)
    assert {rate for name, (rate, _) in found.items() if "lora_B" in name} == {16e-3}
    assert {rate for name, (rate, _) in found.items() if "lora_A" in name} == {1e-3}
    assert {rate for name, (rate, _) in found.items() if "lm_head" in name} == {0.25}


def test_lora_plus_is_that_of_peft(make):  # noqa: F811
    from peft.optimizers import create_loraplus_optimizer
    from torch.optim import AdamW

    from ebft.models.load import load_model
    from ebft.models.tokenizer import load_tokenizer

    modules = {"lora_target_modules": ["embed_tokens", "q_proj"], "lora_modules_to_save": ["norm"]}
    config = make(**{**LORA, **modules, "lora_target_linear": False}, peft_use_dora=True, loraplus_lr_ratio=16.0)
    model = load_model(config, load_tokenizer(config))
    optimizer = create_loraplus_optimizer(model, AdamW, lr=config.learning_rate, loraplus_lr_ratio=16.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {names[id(value)]: group["lr"] for group in optimizer.param_groups for value in group["params"]}
    rate_of = rates_of(config, model)
    assert {name: rate_of(name) for name in expected} == expected
    magnitudes = {rate for name, rate in expected.items() if "magnitude" in name}
    assert magnitudes == {16e-3} and set(expected.values()) == {1e-6, 1e-3, 16e-3}


def test_a_resumed_run_continues_exactly(make, tmp_path):  # noqa: F811
    keys = {**LORA, "loraplus_lr_ratio": 16.0, "max_steps": 4, "save_steps": 2}
    first = weights(train(strided(make, **keys, output_dir=tmp_path / "a")).model)
    resume = {"output_dir": tmp_path / "b", "resume_from_checkpoint": tmp_path / "a" / "checkpoint-2"}
    resumed = weights(train(strided(make, **keys, **resume)).model)
    assert all(value.equal(first[name]) for name, value in resumed.items())
    other = weights(train(strided(make, **{**keys, "loraplus_lr_ratio": None}, output_dir=tmp_path / "c")).model)
    assert any(not value.equal(first[name]) for name, value in other.items())
    with pytest.raises(ConfigError, match="loraplus_lr_ratio: 4.0 differs from loraplus_lr_ratio: 16.0"):
        train(strided(make, **{**keys, "loraplus_lr_ratio": 4.0}, **resume))


def test_adapters_of_embeddings_have_a_rate_of_their_own(make):  # noqa: F811
    from ebft.models.load import load_model
    from ebft.models.tokenizer import load_tokenizer

    modules = {**LORA, "lora_target_linear": False, "lora_target_modules": ["embed_tokens", "q_proj"]}
    for keys, expected in (({}, 1e-6), ({"loraplus_lr_embedding": 1e-5}, 1e-5)):
        config = make(**modules, loraplus_lr_ratio=2.0, **keys)
        model = load_model(config, load_tokenizer(config))
        rate_of = rates_of(config, model)
        found = {rate_of(name) for name, value in model.named_parameters() if value.requires_grad}
        assert found == {expected, 1e-3, 2e-3}


def test_a_group_without_parameters(make):  # noqa: F811
    groups = [{"name": "none", "modules": ["experts"], "lr": 0.5}]
    with pytest.raises(ModelError, match="lr_groups: 'experts' is not part of the name of a trained parameter"):
        train(make(lr_groups=groups))
