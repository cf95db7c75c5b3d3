"""Models that strided EBFT cannot honour exactly are refused, by name or by parity check."""

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from ebft.anchors import BlockOptions
from ebft.errors import ModelError
from ebft.features import FeatureNetwork
from ebft.models.pretrained import check_adapter, disable_dropout, load
from ebft.prefix.attention import attention_adapters
from ebft.prefix.forward import check_length, check_supported, prepare
from ebft.strided.layout import Documents, StridedLayout
from ebft.strided.validation import check_parity
from ebft.structured.scoring import check_parity as check_shared_prompts
from tests.strided.families import _COMMON, FAMILIES, tiny_model
from tests.strided.test_cost import count_tokens
from tests.strided.test_exactness import make_trainer, unequal_batch


def check(model, as_trained=False):
    check_parity(prepare(model), FeatureNetwork(model, [0.25, 0.5, 1.0], "last_token"), as_trained)


def refused(family, match, **config):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    with pytest.raises(ModelError, match=match) as caught:
        check_supported(model)
        prepare(model)
        check(model)
    return str(caught.value)


def test_state_space_layers_are_refused():
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    message = refused("mamba", "state-space", state_size=4, **small)
    assert "Mamba" in message and "structured" in message


def test_linear_attention_layers_are_refused():
    refused(
        "qwen3_next",
        "linear",
        **{**_COMMON, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )


def test_attention_outside_the_interface_is_refused():
    refused("xglm", "does not support the attention interface", vocab_size=50, d_model=32, num_layers=2, ffn_dim=32)


def test_falcon_with_alibi_is_refused():
    refused("falcon", "transformers adds the bias twice with eager attention", alibi=True, **_COMMON)


def test_noise_of_the_training_mode_is_refused_where_it_stays():
    """Functional dropout and router noise: off by default, refused by the parity check if left on."""
    for family, changes in {
        "mixtral": {"router_jitter_noise": 0.5},
        "seed_oss": {"residual_dropout": 0.4, "attention_dropout": 0.0, "head_dim": 8},
    }.items():
        model = tiny_model(family, **changes).train()
        with pytest.raises(ModelError, match="log-probabilities differ.*noise in training mode"):
            check(model, as_trained=True)
        disable_dropout(model)
        check(model.train(), as_trained=True)


def test_rates_that_act_in_eval_mode_too_are_noticed(monkeypatch):
    """PhiMoE's router jitter is also a threshold: training and saved model would compute different functions."""
    model = tiny_model("phimoe").eval()
    ids = torch.randint(3, 90, (2, 30), generator=torch.Generator().manual_seed(0))
    as_loaded = model(input_ids=ids).logits
    disable_dropout(model)
    assert model.train()(input_ids=ids).logits.equal(as_loaded)
    model = tiny_model("phimoe").eval()
    monkeypatch.setattr("ebft.models.pretrained._SAMPLING_ROUTERS", set())
    disable_dropout(model)
    assert (model(input_ids=ids).logits - as_loaded).abs().max() > 0.1
    with pytest.raises(ModelError, match="log-probabilities of strided samples differ"):
        check(model, as_trained=True)
    with pytest.raises(ModelError, match="log-probabilities of samples with shared prompts differ"):
        check_shared_prompts(model)


def test_models_that_break_on_the_mask_are_refused_with_their_name():
    refused("doge", "DogeForCausalLM does not run with strided attention", **_COMMON, head_dim=8)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parity_check_passes_for_supported_families(family, dtype):
    check(tiny_model(family).to(dtype))


def test_parity_check_catches_what_nobody_named():
    """A layer that mixes neighbouring tokens outside attention."""
    model = tiny_model("llama")
    mixer = model.model.layers[1].mlp
    plain = mixer.forward
    mixer.forward = lambda x: plain(x + x.roll(1, dims=1))
    with pytest.raises(ModelError, match="differ from those of the plain model"):
        check(model)


def test_parity_check_compares_what_was_sampled():
    """A layer that is wrong in passes of few tokens only, which decode and do not score."""
    model = tiny_model("llama")
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x if x.shape[1] > 6 else 2 * x)
    with pytest.raises(ModelError, match="log-probabilities of strided samples differ from those of the plain model"):
        check(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_depends_on_the_index_in_a_pass_is_noticed(dtype, monkeypatch):
    """Llama 4's own forward, which scales queries by the index in the pass: by 1.07 from `floor_scale` on."""
    changes = {"floor_scale": 3000, "attention_chunk_size": 16, "attn_scale": 0.1}
    changes |= {"num_hidden_layers": 8, "no_rope_layers": [1, 1, 1, 0] * 2}
    model = tiny_model("llama4_text", **changes).to(dtype)
    counts = count_tokens(model.model.layers)
    check(model)
    assert counts[3] > 3000 > counts[4]  # a few layers contain all kinds
    monkeypatch.delitem(attention_adapters._FORWARD, "Llama4TextAttention")
    model = tiny_model("llama4_text", **changes).to(dtype)
    for refuses in (check, check_shared_prompts):
        with pytest.raises(
            ModelError, match=r"states of a sequence after 3\d\d\d tokens of .*floor_scale: 3000.*structured"
        ):
            refuses(model)


def test_documents_beyond_the_models_positions_are_refused():
    with pytest.raises(ValueError, match=r"129 tokens.*max_position_embeddings \(128\)"):
        check_length(tiny_model("llama"), 129)


def test_length_dependent_rotary_is_refused_past_its_switch():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    model = tiny_model("llama", rope_parameters=rope)
    check_length(model, 32)
    with pytest.raises(ModelError, match="rotary frequencies.*sequences longer than 32"):
        check_length(model, 33)


def test_attention_that_swallows_keyword_arguments_is_named():
    model = prepare(tiny_model("llama"))
    attention = model.model.layers[0].self_attn
    plain = attention.forward
    attention.forward = lambda *args, prefix_pass=None, attention_mask=None, **kwargs: plain(
        *args, attention_mask=None, **kwargs
    )
    documents = Documents.from_inputs({"input_ids": torch.randint(3, 90, (1, 20))})
    layout = StridedLayout.place(documents, BlockOptions(4, 4, 2, 2))
    from ebft.strided.rollout import sample_rollouts

    with pytest.raises(ModelError, match="LlamaAttention does not forward keyword arguments"):
        sample_rollouts(model, documents, layout, temperature=1.0)
    assert model.config._attn_implementation == "eager"


def test_adapters_that_do_not_leave_a_frozen_base_are_refused():
    for config, match in (
        (
            LoraConfig(r=2, target_modules="all-linear", bias="all", task_type="CAUSAL_LM"),
            "trainable in addition to the adapter",
        ),
        (PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "PrefixTuningConfig adds virtual tokens"),
        (PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "PromptTuningConfig adds virtual tokens"),
    ):
        with pytest.raises(ModelError, match=match):
            check_adapter(get_peft_model(tiny_model("qwen2"), config))
    check_adapter(get_peft_model(tiny_model("qwen2"), IA3Config(task_type="CAUSAL_LM")))
    saved = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    check_adapter(get_peft_model(tiny_model("qwen2"), saved))
    check_adapter(tiny_model("qwen2"))


def test_experts_in_float64(tmp_path):
    """PyTorch has no grouped products in float64, but the loop over experts can be used."""
    model = tiny_model("mixtral").double()
    with pytest.raises(ModelError, match="experts of the model are float64.*set_experts_implementation\\('eager'\\)"):
        load(model)
    model.set_experts_implementation("eager")
    trainer = make_trainer(model, tmp_path)
    assert trainer.compute_loss(trainer.model, unequal_batch()[0]).isfinite()


def test_parity_check_fits_models_with_few_positions():
    check(tiny_model("gpt2", n_positions=12))
