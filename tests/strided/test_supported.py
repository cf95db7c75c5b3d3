"""Models that strided EBFT cannot honour exactly are refused, by name or by parity check."""

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from ebft.errors import ModelError
from ebft.features import FeatureNetwork
from ebft.models.causal_lm import unwrap_adapter
from ebft.models.pretrained import check_adapter, disable_dropout
from ebft.prefix.attention import attention_adapters
from ebft.prefix.forward import ROWS, check_length, way_of
from ebft.strided.validation import check_parity
from ebft.structured.scoring import check_shared_prompt_parity as check_shared_prompts
from tests.strided.families import _COMMON, FAMILIES, RUNNING_STATE, tiny_model
from tests.strided.test_cost import count_tokens


def check(model, as_trained=False):
    check_parity(unwrap_adapter(model), FeatureNetwork(model, [0.25, 0.5, 1.0], "last_token"), as_trained)


SMALL = {"vocab_size": 50, "num_layers": 2, "num_hidden_layers": 2, "pad_token_id": 0}


@pytest.mark.parametrize(("family", "config", "match"), [
    ("mamba", {"hidden_size": 32, "state_size": 4, **SMALL}, "Mamba(.|\n)*state-space"),
    ("jamba", {**_COMMON, **RUNNING_STATE["jamba"]}, "linear"),
    ("xglm", {"d_model": 32, "ffn_dim": 32, **SMALL}, "does not support the attention interface"),
    ("doge", {"head_dim": 8, **_COMMON}, "DogeForCausalLM does not run with strided attention"),
])  # fmt: skip
def test_models_that_cannot_share_a_prefix_run_rows(family, config, match):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    with pytest.warns(UserWarning, match=f"each rollout is run with the text before it(.|\n)*{match}"):
        check(model)
    assert way_of(model) == ROWS


@pytest.mark.filterwarnings("ignore:.*each rollout is run with the text before it")
def test_an_adapter_that_the_model_does_not_run_with():
    model = get_peft_model(tiny_model("phimoe"), LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(ModelError, match="does not run with plain passes .*An adapter on a router"):
        check(model)


@pytest.mark.parametrize(("family", "config", "match"), [
    ("falcon", {"alibi": True, **_COMMON}, "differ from those of the plain model"),
    ("bert", {"initializer_range": 0.5, **_COMMON}, "differ from those of the plain model"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*each rollout is run with the text before it")
def test_models_that_are_refused(family, config, match):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    with pytest.raises(ModelError, match=match):
        check(model)


@pytest.mark.parametrize(("family", "changes"), [
    ("mixtral", {"router_jitter_noise": 0.5}), ("seed_oss", {"residual_dropout": 0.4, "attention_dropout": 0.0}),
])  # fmt: skip
def test_noise_of_the_training_mode_is_refused_where_it_stays(family, changes):
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


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_parity_check_passes_for_supported_families_in_bfloat16(family):
    check(tiny_model(family).to(torch.bfloat16))


@pytest.mark.parametrize(("change", "match"), [
    # a layer that mixes neighbouring tokens; one that is wrong in passes of few tokens only, which decode
    (lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], "differ from those of the plain model"),
    (lambda x: x if x.shape[1] > 6 else 2 * x, "of strided samples differ from those of the plain model"),
])  # fmt: skip
def test_parity_check_catches_what_nobody_named(change, match):
    model = tiny_model("llama")
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(change(x))
    with pytest.warns(UserWarning, match=match):
        check(model)
    assert way_of(model) == ROWS


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
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
    message = r"states of a sequence after 3\d\d\d tokens of .*floor_scale: 3000.*structured"
    with pytest.raises(ModelError, match=message):
        check_shared_prompts(model)
    with pytest.warns(UserWarning, match=message.removesuffix(".*structured")):
        check(model)


def test_lengths_that_a_model_does_not_have():
    with pytest.raises(ValueError, match=r"129 tokens.*max_position_embeddings \(128\)"):
        check_length(tiny_model("llama"), 129)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    model = tiny_model("llama", rope_parameters=rope)
    check_length(model, 32)
    with pytest.raises(ModelError, match="documents of more than 32 tokens"):
        check_length(model, 33)
    check(tiny_model("gpt2", n_positions=12))  # the check itself has room in few positions


def test_adapters_that_add_virtual_tokens_are_refused():
    check_adapter(get_peft_model(tiny_model("qwen2"), IA3Config(task_type="CAUSAL_LM")))
    model = get_peft_model(tiny_model("qwen2"), PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ModelError, match="PrefixTuningConfig adds virtual tokens"):
        check_adapter(model)
