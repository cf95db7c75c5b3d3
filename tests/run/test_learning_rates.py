"""Learning rates of single parameters, in the optimizer of a run."""

import warnings
from pathlib import Path

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from torch.optim import AdamW

from ebft import errors, train
from ebft.models import load, pretrained
from ebft.run.trainer import Muon, rates_of
from tests.run.conftest import LORA, strided

EMBEDDINGS = {**LORA, "lora_target_linear": False, "lora_target_modules": ["embed_tokens", "q_proj"]}


def rates(trainer):
    """The peak learning rate of each trained parameter, and the weight decay of its group."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = [(g["initial_lr"], g["weight_decay"], g["params"]) for g in trainer.optimizer.param_groups]
    return {names[id(value)]: (rate, decay) for rate, decay, values in groups for value in values}


def test_groups_embeddings_and_everything_else(make):
    groups = [{"name": "first", "modules": ["layers.0.mlp", "norm.weight"], "lr": 0.5}]
    trainer = train(make(lr_groups=groups, embedding_lr=0.25, weight_decay=0.1, max_steps=1)).trainer
    found = rates(trainer)
    assert len(found) == 21
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged == [1e-3]  # and not that of a group
    assert found["model.layers.0.mlp.up_proj.weight"] == (0.5, 0.1) and found["model.norm.weight"] == (0.5, 0.0)
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (0.25, 0.1)
    assert found["model.layers.1.mlp.up_proj.weight"] == (1e-3, 0.1)
    scaled = rates(train(make(embedding_lr_scale=3.0, max_steps=1)).trainer)
    assert scaled["lm_head.weight"] == (pytest.approx(3e-3), 0.0) and scaled["model.norm.weight"] == (1e-3, 0.0)
    with pytest.raises(errors.ModelError, match="lr_groups: 'experts' is not part of the name of a trained parameter"):
        train(make(lr_groups=[{"name": "none", "modules": ["experts"], "lr": 0.5}]))


def test_another_length_of_a_resumed_run_names_both_rates(make):
    keys = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 9, "lr_scheduler": "linear"}
    saved = Path(train(make(**keys, max_steps=4)).output_dir) / "checkpoint-2"
    named = lambda steps: train(make(**keys, max_steps=steps, resume_from_checkpoint=str(saved)))
    with warnings.catch_warnings(action="ignore"):
        warnings.filterwarnings("error", "The learning rate is")
        named(4)
    with pytest.warns(UserWarning, match="The learning rate is 0.00075 instead of 0.0005 after step 2, where training"):
        trainer = named(8).trainer
    assert trainer.state.global_step == 8


def test_lora_plus_is_that_of_peft(make):
    config = make(**EMBEDDINGS, lora_modules_to_save=["norm"], peft_use_dora=True, loraplus_lr_ratio=16.0)
    model = load.load_model(config, pretrained.load_tokenizer(config))
    optimizer = create_loraplus_optimizer(model, AdamW, lr=config.learning_rate, loraplus_lr_ratio=16.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {names[id(value)]: group["lr"] for group in optimizer.param_groups for value in group["params"]}
    rate_of = rates_of(config, model)
    assert {name: rate_of(name) for name in expected} == expected
    magnitudes = {rate for name, rate in expected.items() if "magnitude" in name}
    assert magnitudes == {16e-3} and set(expected.values()) == {1e-6, 1e-3, 16e-3}
    config = make(**EMBEDDINGS, loraplus_lr_ratio=2.0, loraplus_lr_embedding=1e-5)
    model = load.load_model(config, pretrained.load_tokenizer(config))
    found = {rates_of(config, model)(name) for name, value in model.named_parameters() if value.requires_grad}
    assert found == {1e-5, 1e-3, 2e-3}


def test_muon_orthogonalises_the_steps_of_inner_matrices(make):
    """Their singular values are near 1, in units of AdamW's steps; AdamW itself trains the rest."""
    trainer = train(
        make(max_steps=1, optimizer="muon", lr_groups=[{"name": "a", "modules": ["k_proj"], "lr": 0.5}])
    ).trainer
    found = {name: rate for name, (rate, _) in rates(trainer).items()}
    assert found["model.layers.0.self_attn.k_proj.weight"] == 0.5 != found["model.layers.0.self_attn.q_proj.weight"]
    model = trainer.model
    twins = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    optimizer = Muon(AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model)
    twin = AdamW(twins.values(), lr=0.1, weight_decay=0.5)
    inner = [name for name in twins if "layers" in name and "norm" not in name]
    for _ in range(2):
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        for name, value in model.named_parameters():
            value.grad = twins[name].grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
            if name in inner:
                left, sizes, right = torch.linalg.svd(value.grad, full_matrices=False)
                value.grad = left @ torch.linspace(1, 3, len(sizes)).diag() @ right
        optimizer.step()
        twin.step()
        for name, value in model.named_parameters():
            if name not in inner:
                torch.testing.assert_close(value, twins[name], msg=name)
                continue
            step = (before[name] * (1 - 0.1 * 0.5) - value) / (0.1 * 0.2 * max(value.shape) ** 0.5)
            left, _, right = torch.linalg.svd(value.grad, full_matrices=False)
            sizes = left.T @ step @ right.T
            assert sizes.diagonal().min() > 0.6 and sizes.diagonal().max() < 1.3, name
            assert (sizes - sizes.diagonal().diag()).abs().max() < 0.05, name


def test_a_resumed_run_continues_exactly(make, resumed, tmp_path):
    resumed(optimizer="muon", auto_resume_from_checkpoints=False)
    keys = {**LORA, "loraplus_lr_ratio": 16.0, "lora_modules_to_save": ["lm_head"], "embedding_lr": 0.25}
    found = rates(resumed(**keys))
    for part, rate in (("lora_B", 16e-3), ("lora_A", 1e-3), ("lm_head", 0.25)):
        assert {value for name, (value, _) in found.items() if part in name} == {rate}
    resume = {"max_steps": 4, "resume_from_checkpoint": tmp_path / "a" / "checkpoint-2"}
    with pytest.raises(errors.ConfigError, match="loraplus_lr_ratio: 4.0 differs from loraplus_lr_ratio: 16.0"):
        train(strided(make, **{**keys, "loraplus_lr_ratio": 4.0}, **resume))
