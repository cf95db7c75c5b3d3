"""Settings of FSDP, and weights of checkpoints in models without it; tests/run and tests/structured have runs."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from ebft.errors import ConfigError, ModelError
from ebft.models.sharding import check_version, load_checkpoint_weights
from ebft.tools.export.checkpoint import merge_sharded
from ebft.trainer import OverTrainer
from tests.export.test_sharded import save_parts
from tests.strided.families import tiny_model


@pytest.fixture
def experts(tmp_path):
    """A mixture of experts, whose experts are stacked in the model and separate in files."""
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    return lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def changed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def test_resuming_a_mixture_of_experts(experts, tmp_path):
    """transformers would resume with the experts of the base model, and a warning."""
    trained = changed(experts())
    trained.save_pretrained(tmp_path / "checkpoint")
    args = TrainingArguments(output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True)
    for trainer, is_right in ((Trainer, False), (OverTrainer, True)):
        resumed = experts()
        trainer(resumed, args)._load_from_checkpoint(str(tmp_path / "checkpoint"))
        found = resumed.state_dict()
        assert all(torch.equal(found[name], value) for name, value in trained.state_dict().items()) == is_right


def test_parts_of_a_mixture_of_experts(experts, tmp_path):
    trained = changed(experts())
    for folder in ("whole", "parts"):
        trained.save_pretrained(tmp_path / folder)
    (tmp_path / "parts" / "model.safetensors").unlink()
    save_parts(trained.state_dict(), tmp_path / "parts")
    loaded, merged = experts(), merge_sharded(tmp_path / "parts").folder
    load_checkpoint_weights(loaded, tmp_path / "parts")
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert (merged / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_several_adapters(tiny_llama_dir, tmp_path):
    def model():
        settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        found = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), settings)
        found.add_adapter("ref", settings)
        return found

    saved, loaded = model(), model()
    saved.save_pretrained(tmp_path)
    load_checkpoint_weights(loaded, tmp_path)
    weights = {name: weight for name, weight in saved.named_parameters() if "lora" in name}
    assert len(weights) == 8 and all(torch.equal(loaded.get_parameter(name), w) for name, w in weights.items())


@pytest.mark.parametrize(("change", "message"), [
    (lambda weights: weights.pop("model.norm.weight"), "no weights for model.norm.weight .1 weights are missing"),
    (lambda weights: weights.update(more=torch.ones(2)), "has the weight more, which the model has not"),
    # Which PyTorch would repeat.
    (lambda weights: weights.update({"model.norm.weight": torch.ones(1)}), r"has the shape \(1,\) in .*, but \(32,\)"),
])  # fmt: skip
def test_weights_that_do_not_fit(tiny_llama_dir, tmp_path, change, message):
    weights = load_file(tiny_llama_dir / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_checkpoint_weights(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), tmp_path)


def test_an_adapter_that_does_not_fit_is_refused(tiny_llama_dir, tmp_path):
    def model(r, *names):
        settings = LoraConfig(r=r, target_modules=list(names))
        return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), settings)

    model(2, "q_proj").save_pretrained(tmp_path)
    load_checkpoint_weights(model(2, "q_proj"), tmp_path)
    for settings, message in (
        ((2, "q_proj", "v_proj"), "has no weights for .*v_proj.lora_A.weight .4 weights are missing"),
        ((2, "v_proj"), "q_proj.lora_A.weight has the shape .* but None in the model. Resume with the base"),
    ):
        with pytest.raises(ModelError, match=message):
            load_checkpoint_weights(model(*settings), tmp_path)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_fit_under_either_name(tiny_llama_dir, tmp_path, name):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.lm_head.weight = model.model.embed_tokens.weight
    weights = {key: value.clone() for key, value in model.state_dict().items() if key != name}
    save_file(weights, tmp_path / "model.safetensors")
    load_checkpoint_weights(model, tmp_path)


def accelerator(**changes):
    settings = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "mixed_precision_policy": None, **changes}
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(**settings)))


def test_settings_that_are_refused_or_supported():
    for changes, message in (
        ({"fsdp_version": 1}, "FSDP1 is not supported. Remove version from fsdp_config"),
        ({"cpu_ram_efficient_loading": True}, "a vLLM server is incompatible with cpu_ram_efficient_load"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_version(accelerator(**changes), "cpu" in str(changes))
    check_version(accelerator(cpu_ram_efficient_loading=True))
