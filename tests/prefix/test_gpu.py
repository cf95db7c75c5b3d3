"""The branches that accelerators take, on CPU, against the modules of transformers and PEFT as they are."""

import copy
import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from ebft.prefix import gpu
from ebft.prefix.gpu import cheap_adapters, fuse, rotate

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    monkeypatch.setattr(gpu, "is_accelerator", lambda device: True)
    monkeypatch.setattr(gpu, "_memory", lambda device: 2**30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_its_gradients(dtype):
    torch.manual_seed(0)
    plain = LlamaRMSNorm(32, eps=1e-3).to(dtype)
    plain.weight.data.normal_()
    fused = copy.deepcopy(plain)
    fuse(fused)
    found = []
    for norm in (plain, fused):
        x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        y = norm(x)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), (x, norm.weight))))
    assert "forward" in fused.__dict__ and found[1][0].dtype == dtype
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("shape", [(4, 8), (1,)])
def test_norms_with_other_weights_stay_as_they_are(shape):
    """One of each head, as some models have for queries, and a single one."""
    norm, x = LlamaRMSNorm(8), torch.randn(2, 5, 4, 8)
    norm.weight = torch.nn.Parameter(torch.rand(shape))
    expected = norm(x)
    fuse(norm)
    assert torch.equal(norm(x), expected)


def test_a_model_is_loaded_from_a_pickle():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **SHAPE))
    for module in model.modules():
        fuse(module)
    file, ids = io.BytesIO(), torch.randint(64, (2, 9))
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16])
def test_rotary_embedding_and_its_gradients(tables):
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 7, 8, requires_grad=True), torch.randn(1, 2, 7, 8, requires_grad=True)
    angles = torch.randn(1, 7, 8)
    cos, sin = angles.cos().to(tables), angles.sin().to(tables)
    grads = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8)
    expected, found = apply_rotary_pos_emb(q, k, cos, sin), rotate(q, k, cos, sin)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (q, k), grads), torch.autograd.grad(expected, (q, k), grads))


@pytest.mark.parametrize(("config", "model_class", "norms"), [
    (LlamaConfig, LlamaForCausalLM, 5), (Qwen3Config, Qwen3ForCausalLM, 9), (GemmaConfig, GemmaForCausalLM, 0),
])  # fmt: skip
def test_layers_of_a_model(config, model_class, norms):
    """Gemma's norm has other code, and stays as it is; its rotary embedding is Llama's."""
    torch.manual_seed(0)
    plain = model_class(config(vocab_size=64, num_hidden_layers=2, **SHAPE)).eval()
    fused = copy.deepcopy(plain)
    for module in fused.modules():
        fuse(module)
    names = [type(module).__name__ for module in fused.modules() if "forward" in module.__dict__]
    assert sum("Norm" in name for name in names) == norms and sum("Attention" in name for name in names) == 2
    ids = torch.randint(64, (2, 9))
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, fused)]
    torch.testing.assert_close(losses[1], losses[0])
    grads = [torch.autograd.grad(loss, model.parameters()) for loss, model in zip(losses, (plain, fused))]
    torch.testing.assert_close(grads[1], grads[0])


def adapted(**options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **SHAPE)).eval()
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**{**settings, **options})).eval()


def test_folded_adapters():
    model, ids = adapted(), torch.randint(64, (2, 9))
    causal_lm = model.get_base_model()
    causal_lm.model.layers[0].self_attn.o_proj = causal_lm.model.layers[0].self_attn.q_proj.base_layer  # has no adapter
    before = {key: x.clone() for key, x in model.state_dict().items()}
    weights = {name: parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with pytest.raises(RuntimeError, match="stop"), cheap_adapters(causal_lm):
            for layer in causal_lm.modules():
                if hasattr(layer, "lora_A"):
                    layer.lora_A["default"].weight.zero_()  # no longer read
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
            raise RuntimeError("stop")
    assert not any("forward" in layer.__dict__ for layer in causal_lm.modules())
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[key].equal(x) for key, x in before.items() if "lora_A" not in key)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize(
    "case", ["dora", "bfloat16", "base in bfloat16", "dropout", "autocast", "disabled", "gradients", "memory", "bias"]
)
def test_adapters_that_are_not_folded(case, monkeypatch):
    options = {"dora": {"use_dora": True}, "dropout": {"lora_dropout": 0.1}, "bias": {"lora_bias": True}}
    model, ids = adapted(**options.get(case, {})), torch.randint(64, (2, 9))
    if case == "bfloat16":
        model.get_base_model().to(torch.bfloat16)
    if case == "base in bfloat16":  # as `ebft train` has it: adapters stay in float32
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data if "lora_" in name else parameter.data.to(torch.bfloat16)
    if case == "dropout":
        model.train()
    if case == "memory":  # q_proj and down_proj of both layers: 4 bytes for 2 * (32 * 32 + 48 * 32) weights
        monkeypatch.setattr(gpu, "_memory", lambda device: 8 * 4 * 2 * (32 * 32 + 48 * 32) - 1)
    if case == "disabled":
        model.base_model.disable_adapter_layers()
    causal_lm, autocast = model.get_base_model(), torch.autocast("cpu", enabled=case == "autocast")
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    with torch.set_grad_enabled(case == "gradients"), autocast:
        torch.manual_seed(0)
        expected = model(input_ids=ids).logits
        with cheap_adapters(causal_lm):
            torch.manual_seed(0)
            found = model(input_ids=ids).logits
            added = {"forward" in layer.__dict__ for layer in layers}
    assert added == {case in ("bfloat16", "base in bfloat16", "autocast", "memory")}
    assert not any("forward" in layer.__dict__ for layer in layers)
    tolerance = {} if expected.dtype == torch.float32 and case != "autocast" else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(found, expected, **tolerance)
