"""LoRA adapters: which modules get one, and in which type; and training of some parameters."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from ebft.errors import ModelError
from ebft.models import load, pretrained
from ebft.models.adapter import load_saved_adapter
from ebft.run.training import _adapter
from tests.strided.families import tiny_model

PAD = {"pad_token": "<|end|>"}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "special_tokens": PAD}
OTHER = {"peft_type": "LORA", "base_model_name_or_path": "/models/Other"}


def adapted(config):
    return load.load_model(config, pretrained.load_tokenizer(config))


def adapted_layers(model):
    return sorted({name.rpartition(".")[2] for name in model.targeted_module_names})


LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
ALL = {"lora_target_linear": True}


@pytest.mark.parametrize(("keys", "layers"), [
    (ALL, LINEAR),
    ({"lora_target_modules": ["q_proj", "v_proj"]}, ["q_proj", "v_proj"]),
    ({"lora_target_modules": r".*\.layers\.1\.self_attn\.(q|o)_proj"}, ["o_proj", "q_proj"]),
    ({"lora_target_linear_modules": [r"language_model\.model\.layers\.\d+\.self_attn\.q_proj"]}, ["q_proj"]),
    ({"lora_target_linear_modules": ["o_proj"], "lora_target_modules": ["q_proj"]}, ["o_proj", "q_proj"]),
    ({"lora_target_modules": r"model\.(?!layers|norm|embed|rotary).*|.*layers\.(?!0).*q_proj"}, ["q_proj"]),
])  # fmt: skip
def test_targets(make_config, keys, layers):
    assert adapted_layers(adapted(make_config(**LORA, **keys))) == sorted(layers)


@pytest.mark.parametrize("kind", ["mamba2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
    "falcon_mamba", "falcon_h1", "nemotron_h"))])  # fmt: skip
def test_layers_that_peft_refuses_in_mamba_are_left_out(kind, make_base, make_config):
    keys = {**LORA, "base_model": make_base(tiny_model(kind, vocab_size=512))}
    for more in ({}, {"peft_layers_to_transform": 0}):
        with pytest.warns(UserWarning, match=f"layers out_proj are not adapted, since PEFT refuses .* type {kind}"):
            layers = adapted_layers(adapted(make_config(**keys, **ALL, **more)))
        assert "in_proj" in layers and "out_proj" not in layers


def test_the_settings_of_an_adapter_whose_weights_are_float32(make_config):
    model = adapted(make_config(**LORA, **ALL, lora_dropout=0.25, torch_dtype="bfloat16"))
    settings = model.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.lora_dropout) == (4, 8, 0.25)
    spread = lambda model: model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight.std().item()
    assert spread(model) == pytest.approx(0.1, rel=0.2)  # 1 / sqrt(3 * 32)
    gaussian = adapted(make_config(**LORA, **ALL, peft_init_lora_weights="gaussian"))
    assert spread(gaussian) == pytest.approx(0.25, rel=0.2)  # 1 / r
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    patterns = {"lora_rank_pattern": {"layers.0.*q_proj": 6}, "lora_alpha_pattern": {"q_proj": 3}}
    layers = [each.self_attn.q_proj for each in adapted(make_config(**LORA, **ALL, **patterns)).model.model.layers]
    assert [(each.r["default"], each.scaling["default"]) for each in layers] == [(6, 0.5), (4, 0.75)]
    model = adapted(make_config(**LORA, **ALL, lora_modules_to_save=["embed_tokens"]))
    assert any("embed_tokens" in name for name, weight in model.named_parameters() if weight.requires_grad)


def trained(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("keys", [{**LORA, **ALL}, {"unfrozen_parameters": [r"model\.layers\.0\.mlp"]}])
def test_checkpointing_lets_gradients_through_frozen_embeddings(make_config, keys):
    """transformers lets the outputs of the embeddings require gradients; reentrant checkpoints drop them otherwise."""
    config = make_config(**{"special_tokens": PAD, **keys})
    model = adapted(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    ids = torch.tensor([[1, 2, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()
    grads = [model.get_parameter(name).grad for name in trained(model)]
    share = 0.5 if "adapter" in keys else 1  # B of LoRA is 0 at first, so A has no gradient
    assert sum(grad.abs().sum() > 0 for grad in grads) == share * len(grads) > 0


@pytest.mark.parametrize(("keys", "message"), [
    ({"lora_target_modules": ["k_prj", "q_prj"]}, "q_prj' matches no module. The linear layers are down"),
    ({**ALL, "peft_layers_to_transform": [0, 2]}, "peft_layers_to_transform: 2 is not a layer of the model, which ha"),
])  # fmt: skip
def test_targets_that_are_refused(make_config, keys, message):
    with pytest.raises(ModelError, match=message):
        adapted(make_config(**LORA, **keys))


def test_a_saved_adapter_finds_its_local_base_model_from_anywhere(make_config, tiny_llama_dir, monkeypatch, tmp_path):
    monkeypatch.chdir(tiny_llama_dir.parent)
    model = adapted(make_config(**LORA, lora_target_linear=True, base_model=tiny_llama_dir.name))
    assert model.peft_config["default"].base_model_name_or_path == str(tiny_llama_dir)


@pytest.mark.parametrize(("task", "model", "fits"), [
    (None, AutoModelForCausalLM, True), ("CAUSAL_LM", AutoModelForSequenceClassification, False),
    ("SEQ_CLS", AutoModelForCausalLM, False),
])  # fmt: skip
def test_the_task_of_a_saved_adapter(task, model, fits, tiny_llama_dir, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({**OTHER, "task_type": task}))
    message = "has no adapter_model.safetensors" if fits else "has another output layer"
    with pytest.raises(ModelError, match=message), pytest.warns(UserWarning, match="trained on /models/Other; with"):
        load_saved_adapter(model.from_pretrained(tiny_llama_dir), str(tmp_path))


def test_some_layers(make_config):
    chosen = {"lora_target_modules": ["q_proj"], "peft_layers_to_transform": 0, "peft_layers_pattern": "layers"}
    assert adapted(make_config(**LORA, **chosen)).targeted_module_names == ["model.layers.0.self_attn.q_proj"]
    others = {"peft_use_rslora": True, "peft_use_dora": True}
    settings = adapted(make_config(**LORA, **chosen, **others)).peft_config["default"]
    assert settings.use_rslora and settings.use_dora and settings.layers_pattern == "layers"
    for keys in ({}, {"lora_target_modules": ["q_proj"]}):
        names = adapted(make_config(**LORA, **ALL, **keys, peft_layers_to_transform=[1])).targeted_module_names
        assert len(names) == 7 and all(".layers.1." in name for name in names)


_SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "qwen2_moe": {"num_experts": 4, **_EXPERTS, "shared_expert_intermediate_size": 8},
    "glm4_moe": {"n_routed_experts": 4, **_EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "phimoe": {"num_local_experts": 4},
}


@pytest.fixture
def mixture(make_config, make_base):
    """`mixture(kind, **keys)`: a config over a tiny mixture of experts."""

    def make(kind, **keys):
        settings = {"vocab_size": 512, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
        config = AutoConfig.for_model(kind, **_SIZES, **settings, **MIXTURES[kind])
        return make_config(base_model=make_base(AutoModelForCausalLM.from_config(config)), **{**LORA, **keys})

    return make


def test_fused_experts(mixture):
    wanted = ["experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    model = adapted(mixture("mixtral", lora_target_parameters=wanted, torch_dtype="bfloat16"))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    # A and B of 4 experts of rank 4 in two layers, and of the other parameter in one
    assert len(trained) == 6 and all("mlp.experts" in name for name in trained)
    assert {weight.shape for name, weight in trained.items() if "lora_A" in name} == {(16, 32), (16, 24)}
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    both = adapted(mixture("mixtral", lora_target_parameters=wanted[:1], lora_target_modules=["q_proj"]))
    assert sum(weight.requires_grad for weight in both.parameters()) == 8


ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
FUSED = ["experts.down_proj", "experts.gate_up_proj"]
SHARED = ["shared_expert.down_proj", "shared_expert.gate_proj", "shared_expert.up_proj"]


@pytest.mark.parametrize(("kind", "keys", "expected"), [
    ("qwen3_moe", {**ALL, "lora_dropout": 0.1}, ATTENTION),
    ("mixtral", {**ALL, "lora_target_modules": ["w1", "w2", "w3"]}, [*FUSED, *ATTENTION]),
    ("phimoe", ALL, ATTENTION),  # its router is a linear layer; PEFT knows no experts
    ("qwen2_moe", ALL, [*SHARED, *ATTENTION, "shared_expert_gate"]),
    ("qwen3_moe", {"lora_target_modules": ["gate_proj", "up_proj", "down_proj"]}, FUSED),
    ("qwen3_moe", {"lora_target_modules": r".*(q_proj|experts\.(gate|up)_proj)"}, [FUSED[1], "q_proj"]),
])  # fmt: skip
def test_what_is_adapted_in_a_mixture_of_experts(mixture, kind, keys, expected, recwarn):
    model = adapted(mixture(kind, **keys))
    assert not [warning for warning in recwarn if "_pattern keys" in str(warning.message)]
    names = [*model.targeted_module_names, *model.targeted_parameter_names]
    short = lambda name: ".".join(name.split(".")[-2 if "expert" in name.split(".")[-2] else -1 :])
    assert sorted({short(name) for name in names}) == sorted(expected)
    assert len(names) == len(expected) * (1 if "layers" in str(keys) else 2)
    if FUSED[1] in expected:  # PEFT gives the stacked gate_proj and up_proj twice the rank
        layer = model.get_submodule("base_model.model.model.layers.1.mlp.experts")
        inner = layer.base_layer if FUSED[0] in expected else layer
        assert inner.lora_A["default"].weight.shape[0] == 2 * 4 * 4 and inner.scaling["default"] == 2
    summary = _adapter(model)
    assert all(f"{name} (" in summary for name in expected if "shared" not in name)
    assert ("fused experts not adapted: experts." in summary) == (not {*FUSED} <= {*expected})


@pytest.mark.parametrize(("kind", "wanted", "message"), [
    ("qwen3_moe", "layers.1.mlp.experts.down_proj", "all layers.*lora_target_parameters: model.layers.0.mlp.exp"),
    ("glm4_moe", "layers.0.mlp.down_proj", "selects some of the layers that have this name"),
])  # fmt: skip
def test_names_that_do_not_select_experts(mixture, kind, wanted, message):
    with pytest.raises(ModelError, match=message):
        adapted(mixture(kind, lora_target_modules=[wanted]))


def test_linear_layers_that_peft_cannot_adapt_beside_others(mixture):
    names = ["q_proj", "shared_experts.up_proj", "shared_experts.down_proj"]
    message = "names up_proj, down_proj for the fused experts, .*: shared_experts.down_proj, shared_experts.up_proj are"
    with pytest.warns(UserWarning, match=message):
        model = adapted(mixture("glm4_moe", lora_target_modules=names))
    assert adapted_layers(model) == ["q_proj"] and not model.targeted_parameter_names
    with pytest.warns(UserWarning, match="for the fused experts, and .*: mlp.down_proj, .*up_proj are not adapted"):
        assert adapted_layers(adapted(mixture("glm4_moe", **ALL))) == ATTENTION


def test_names_in_the_checkpoint(mixture, make_config):
    attention = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    sparse = r"model.layers.[01].block_sparse_moe"
    parts = [".gate.weight", ".experts.gate_up_proj", ".experts.down_proj"]
    choose = lambda kind, pattern: trained(adapted(mixture(kind, adapter=None, unfrozen_parameters=[pattern])))
    assert choose("mixtral", sparse) == [f"model.layers.{i}.mlp{part}" for i in range(2) for part in parts]
    layer = choose("mixtral", r"model\.layers\.1\.(self_attn|block_sparse_moe)\.")
    assert layer == [f"model.layers.1.{own}" for own in (*attention, *(f"mlp{part}" for part in parts))]
    assert choose("mixtral", r"model\.layers\.1\.(?!mlp|.*norm|.*o_proj)") == layer[:3]
    with pytest.raises(ModelError, match=r"experts.0.w1.weight, .* and 2 more, parts of .*gate_up"):
        choose("mixtral", rf"{sparse}.experts.\d.w1")
    with pytest.raises(ModelError, match="'layers' matches no parameter. Names are compared from the start"):
        choose("mixtral", "layers")
    with pytest.warns(UserWarning, match="'layers' matches no parameter"):
        assert trained(adapted(mixture("mixtral", adapter=None, unfrozen_parameters=["layers", sparse])))
    whole = {"special_tokens": PAD, "unfrozen_parameters": [r"model.language_model.layers.1.self_attn.(q|k)_proj"]}
    assert trained(adapted(make_config(**whole))) == [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk"]


def test_a_tied_output_layer_is_named(make_config, make_base):
    tied = {"special_tokens": PAD, "base_model": make_base(tie_word_embeddings=True)}
    with pytest.raises(ModelError, match="matches no parameter.* a layer with tied weights has the name of the first"):
        adapted(make_config(**tied, unfrozen_parameters=["^lm_head.weight$"]))
    model = adapted(make_config(**tied, unfrozen_parameters=["model.embed"]))
    assert trained(model) == ["model.embed_tokens.weight"]
    with pytest.warns(UserWarning, match="lora_modules_to_save: lm_head keeps the weights that it shares"):
        adapted(make_config(**{**LORA, **ALL, **tied}, lora_modules_to_save=["embed_tokens"]))
