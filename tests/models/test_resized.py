"""A model whose vocabulary was resized computes the same logits when its adapter is loaded again, or merged."""

import warnings

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from ebft.errors import ModelError
from ebft.models import adapter, load, pretrained
from ebft.tools.evaluation.models import load_subject
from ebft.tools.export.merge import adapter_in_folder, merge_adapter
from ebft.tools.inference.models import model_in_folder

NEW = {"tokens": ["<new>", "<newer>"]}  # 514 rows
MULTIPLE = {**NEW, "resize_token_embeddings_to_32x": True}  # 544 rows
IDS = torch.tensor([[0, 90, 512, 100, 513, 7]])
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["tied", "untied"])
def base(request, make_base):
    return make_base(tie_word_embeddings=request.param == "tied")


@pytest.fixture
def configured(make_config):
    """`configured(base, targets, **keys)`: a config with LoRA, and its tokenizer."""

    def make(base, targets, **keys):
        lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": targets}
        special = {"pad_token": "<|end|>"}
        config = make_config(base_model=str(base), special_tokens=special, **lora, **keys)
        return config, pretrained.load_tokenizer(config)

    return make


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS % model.config.vocab_size).logits


def trained(model):
    """The model with other values of everything that is trained."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def check_loading_and_merging(config, tokenizer, folder):
    """The logits of a trained adapter: on the model of the config, in its folder alone, and merged."""
    model = trained(load.load_model(config, tokenizer))
    expected, merged, folder = logits(model), folder / "merged", save(model, tokenizer, folder / "adapter")
    torch.manual_seed(7)  # new rows that are not saved would have other values
    loaded = adapter.load_saved_adapter(load.load_base_model(config, tokenizer), str(folder), len(tokenizer))
    assert torch.equal(logits(loaded), expected)
    other = config.model_copy(update={"lora_model_dir": str(folder), "peft_layers_to_transform": [0]})
    with pytest.warns(UserWarning, match=r"peft_layers_to_transform: \[0\] has no effect: the adapter in"):
        continued = load.load_model(other, tokenizer)
    assert torch.equal(logits(continued), expected) and any(weight.requires_grad for weight in continued.parameters())
    assert torch.equal(logits(model_in_folder(str(folder)).tuned), expected)
    other = config.model_copy(update={"resize_token_embeddings_to_32x": False})
    assert torch.equal(logits(load_subject(other, str(folder), tokenizer).policy), expected)
    merge_adapter(adapter_in_folder(folder), merged)
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=1e-5)
    return expected


@pytest.mark.first(4)
@pytest.mark.parametrize(("targets", "saved", "size"), [
    (["q_proj"], None, MULTIPLE), (["embed_tokens", "lm_head"], None, MULTIPLE),
    (["q_proj"], ["embed_tokens", "lm_head"], NEW), (["q_proj", "lm_head"], ["embed_tokens"], NEW),
])  # fmt: skip
def test_logits_after_loading_and_merging(base, targets, saved, size, configured, tmp_path):
    config, tokenizer = configured(base, targets, lora_modules_to_save=saved, **size)
    rows = 544 if size is MULTIPLE else 514
    message = rf"resized from 512 to {rows} rows .* fits only a base model with {rows} rows.*: ebft merge-lora"
    with pytest.warns(UserWarning, match=message):
        expected = check_loading_and_merging(config, tokenizer, tmp_path)
    assert expected.shape[-1] == rows
    plain = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))


@pytest.mark.parametrize(("target", "size"), [("embed_tokens", NEW), ("lm_head", MULTIPLE)])
def test_one_of_two_layers(base, target, size, configured, tmp_path):
    config, tokenizer = configured(base, ["q_proj", target], **size)
    if AutoConfig.from_pretrained(base).tie_word_embeddings:  # one weight, which is saved
        check_loading_and_merging(config, tokenizer, tmp_path)
        return
    other = "lm_head" if target == "embed_tokens" else "embed_tokens"
    rows = 544 if size is MULTIPLE else 514
    message = rf"lora_target_modules: .* from 512 to {rows} .* not save new rows of {other} .* Add {other} to lora_"
    with pytest.raises(ModelError, match=message):
        load.load_model(config, tokenizer)


def test_saved_adapters_without_the_other_layer_are_refused(tiny_llama_dir, configured, tmp_path):
    """An adapter of PEFT on resized layers, of which it has one."""
    target, other = "embed_tokens", "lm_head"
    config, tokenizer = configured(tiny_llama_dir, ["q_proj", target], **NEW)
    model = load.load_base_model(config, tokenizer)
    folder = save(get_peft_model(model, adapter.lora_config(model, config)), tokenizer, tmp_path / "old")
    message = f"resized to 514 rows, but has only the rows of {target}: the new rows of {other} were not saved"
    with pytest.raises(ModelError, match=message):
        merge_adapter(adapter_in_folder(folder), tmp_path / "merged")
    assert not (tmp_path / "merged" / "config.json").exists()
    with pytest.raises(ModelError, match=f"cannot be loaded on .*{message}"):
        model_in_folder(str(folder))
    with pytest.raises(ModelError, match=f"lora_model_dir: .*{message}"):
        load.load_model(config.model_copy(update={"lora_model_dir": str(folder)}), tokenizer)


def test_a_layer_that_peft_would_not_save_at_all_is_refused(tiny_llama_dir, configured, monkeypatch):
    config, tokenizer = configured(tiny_llama_dir, ["q_proj"], **NEW)
    model = load.load_base_model(config, tokenizer)
    model.config.name_or_path = model.name_or_path = ""  # PEFT compares the vocabulary with that of this folder
    monkeypatch.setattr("ebft.models.load.load_base_model", lambda *_: model)
    message = "not save new rows of embed_tokens and lm_head .* Add embed_tokens and lm_head to lora_mod"
    with pytest.raises(ModelError, match=message):
        load.load_model(config, tokenizer)


def test_embeddings_of_the_original_size_are_not_saved(tiny_llama_dir, configured, tmp_path):
    config, tokenizer = configured(tiny_llama_dir, ["q_proj"])
    with warnings.catch_warnings(action="error", category=UserWarning):
        model = load.load_model(config, tokenizer)
    folder = save(trained(model), tokenizer, tmp_path / "adapter")
    assert not any("embed" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert isinstance(model_in_folder(str(folder)).tuned, PeftModel)
