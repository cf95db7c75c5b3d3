"""Cross-entropy in chunks: the loss of transformers' own forward and its gradients, for heads of every kind."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from ebft.prefix import logps, sampling
from ebft.prefix.forward import take_programs
from ebft.sft.cross_entropy import summed_cross_entropy, token_cross_entropies, why_not_in_chunks

VOCAB, IGNORE = 37, -100
SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
MODELS = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "own head": ("llama", {"tie_word_embeddings": False}),
    "soft-capped": ("gemma2", {"final_logit_softcapping": 2.0, "layer_types": ["full_attention"] * 2}),
    "scaled": ("granite", {"logits_scaling": 3.0}),
    "biased": ("phi", {}),
    "projected": ("opt", {"ffn_dim": 24, "word_embed_proj_dim": 8}),
    "convolutional": ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "recurrent": ("mamba", {"state_size": 4}),
    "experts": ("qwen2_moe", {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4}),
}


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """16 positions at a time, the least, in tiles of one row."""
    monkeypatch.setattr(logps, "LOGITS_PER_CHUNK", {"cpu": 1})
    monkeypatch.setattr(sampling, "_SOFTMAX_PER_TILE", {"cpu": VOCAB})


def model_of(name, **changes):
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **options, **changes, "pad_token_id": 0, "eos_token_id": 1})
    return AutoModelForCausalLM.from_config(config).eval()


def batch():
    """Two rows of 30 and 21 tokens; of each, some are not learned."""
    torch.manual_seed(1)
    ids, mask = torch.randint(2, VOCAB, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    mask[1, 21:] = 0
    labels = ids.masked_fill(mask == 0, IGNORE)
    labels[0, :5] = labels[1, 7:11] = IGNORE
    return {"input_ids": ids, "attention_mask": mask}, labels


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("adapter", [None, "layers", "head"])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_its_gradients_are_those_of_the_models_forward(name, adapter):
    model = model_of(name)
    if adapter is not None:
        targets = ["lm_head"] if adapter == "head" else ["in_proj"] if name == "recurrent" else "all-linear"
        if adapter == "head" and model.config.tie_word_embeddings:
            pytest.skip("PEFT does not adapt a tied head by itself")
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    inputs, labels = batch()
    whole = model(**inputs, labels=labels, num_items_in_batch=7).loss
    expected = gradients(model, whole)
    take_programs(model)
    ours = summed_cross_entropy(model, inputs, labels[:, 1:], labels[:, 1:] != IGNORE) / 7
    torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients(model, ours).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=2e-6, msg=name)


def test_the_head_sees_positions_with_labels_only_in_chunks_and_once():
    model = model_of("own head")
    take_programs(model)
    inputs, labels = batch()
    learned, seen = labels[:, 1:] != IGNORE, []
    model.lm_head.register_forward_hook(lambda head, args, logits: seen.append(logits.numel() // VOCAB))
    loss = summed_cross_entropy(model, inputs, labels[:, 1:], learned)
    loss.backward(retain_graph=True)
    assert sum(seen) == learned.sum() == 41 and max(seen) == 16
    with pytest.raises(TypeError):  # its gradients are handed on once
        loss.backward()
    nothing = summed_cross_entropy(model, inputs, labels[:, 1:], torch.zeros(2, 29, dtype=torch.bool))
    assert nothing == 0 and all(not gradient.any() for gradient in gradients(model, nothing).values())


def test_weights_in_bfloat16_have_the_gradients_of_a_single_product():
    model = model_of("own head", hidden_size=64)
    torch.manual_seed(2)
    ids = torch.randint(2, VOCAB, (8, 60))
    labels = ids.clone()
    exact = gradients(model, model(input_ids=ids, labels=labels).loss)["lm_head.weight"].clone()
    model = model.to(torch.bfloat16)
    plain = gradients(model, model(input_ids=ids, labels=labels).loss)["lm_head.weight"].float()
    take_programs(model)
    loss = summed_cross_entropy(model, {"input_ids": ids}, labels[:, 1:], labels[:, 1:] != IGNORE) / (8 * 59)
    ours = gradients(model, loss)["lm_head.weight"].float()
    assert (ours - exact).norm() < 1.2 * (plain - exact).norm()


def test_losses_of_tokens_are_those_of_all_logits_and_zero_elsewhere():
    model = model_of("soft-capped")
    take_programs(model)
    inputs, _ = batch()
    torch.manual_seed(3)
    targets, scored = torch.randint(VOCAB, (2, 29, 2)), torch.rand(2, 29) < 0.7
    found = token_cross_entropies(model, inputs, targets, scored)
    whole = -model(**inputs).logits[:, :-1].log_softmax(-1).gather(-1, targets)
    torch.testing.assert_close(found, whole * scored[..., None], rtol=1e-6, atol=1e-6)


class OwnLoss(LlamaForCausalLM):
    pass


def test_models_whose_loss_has_other_terms_are_named():
    assert why_not_in_chunks(model_of("experts")) is None
    assert "term for the router" in why_not_in_chunks(model_of("experts", output_router_logits=True))
    assert "loss of its own" in why_not_in_chunks(OwnLoss(model_of("tied").config))
    bart = AutoModelForCausalLM.from_config(AutoConfig.for_model("bart", d_model=16, vocab_size=9, decoder_layers=1))
    assert "loss of its own" in why_not_in_chunks(bart)
