"""The merged model is that of PEFT's merge_and_unload, whatever the kind of adapter, architecture and shards."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft.errors import ModelError
from ebft.tools.export.merge import MergeSource, merge_adapter
from tests.export.models import gpt2, llama, logits, mixtral, qwen2, save_adapter, save_base, with_adapter

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS = {
    "lora": (llama(), {"target_modules": ["q_proj", "v_proj"]}),
    "rslora": (llama(), {"target_modules": "all-linear", "use_rslora": True}),
    "patterns": (
        llama(),
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 9}},
    ),
    "dora": (llama(), {"target_modules": "all-linear", "use_dora": True}),
    "embedding": (llama(), {"target_modules": ["embed_tokens", "lm_head"]}),
    "modules_to_save": (llama(), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "tied_modules_to_save": (
        llama(tie_word_embeddings=True),
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "tied_saved_together": (
        llama(tie_word_embeddings=True),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied_untouched": (llama(tie_word_embeddings=True), {"target_modules": ["o_proj"]}),
    "bias_all": (qwen2(), {"target_modules": ["q_proj"], "bias": "all"}),
    "bias_lora_only": (qwen2(), {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "lora_bias": (qwen2(), {"target_modules": ["q_proj"], "lora_bias": True}),
    "conv1d": (gpt2(), {"target_modules": ["c_attn", "c_fc"]}),
    "experts": (mixtral(), {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts_by_module_names": (mixtral(), {"target_modules": ["w1", "w2", "w3"]}),
    "some_layers": (llama(), {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}),
    "orthogonal": (llama(), {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal", "use_rslora": True}),
    "some_experts": (mixtral(), {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]}),
}


def assert_equal(model, expected):
    own, other = model.state_dict(), expected.state_dict()
    assert own.keys() == other.keys()
    different = [
        name for name in own if own[name].dtype != other[name].dtype or not torch.equal(own[name], other[name])
    ]
    assert different == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_result_is_that_of_peft(variant, dtype, tmp_path):
    config, settings = VARIANTS[variant]
    base = save_base(tmp_path / "base", config, dtype)
    adapter = save_adapter(tmp_path / "adapter", base, **settings)
    result = merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    unmerged = with_adapter(base, adapter)
    expected = logits(unmerged)
    assert_equal(merged, unmerged.merge_and_unload())
    assert (logits(AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 1e-3
    if dtype == torch.float32:
        assert torch.allclose(logits(merged), expected, atol=1e-5)
    assert result.shards == len(list((tmp_path / "base").glob("*.safetensors")))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_tied_weight_of_which_one_is_adapted_is_written_twice(target, tmp_path):
    # PEFT changes both, which the adapter does not.
    base = save_base(tmp_path / "base", llama(tie_word_embeddings=True))
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj", target])
    result = merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert result.untied and not merged.config.tie_word_embeddings
    assert torch.allclose(logits(merged), logits(with_adapter(base, adapter)), atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(base).model.embed_tokens.weight
    other = merged.lm_head if target == "embed_tokens" else merged.model.embed_tokens
    assert torch.equal(other.weight, plain)


def test_a_change_of_tied_weights_is_merged_once(tmp_path):
    # PEFT adds it twice, once for each of the layers.
    base = save_base(tmp_path / "base", llama(tie_word_embeddings=True))
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["embed_tokens"], ensure_weight_tying=True)
    assert not merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged").untied
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert torch.allclose(logits(merged), logits(with_adapter(base, adapter)), atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embeddings_that_were_resized_before_training(tied, tmp_path):
    base = save_base(tmp_path / "base", llama(tie_word_embeddings=tied))
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(131)
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    expected = tuned.merge_and_unload()
    result = merge_adapter(MergeSource(tmp_path / "adapter", str(base)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == 131 and not result.untied
    assert_equal(merged, expected)


@pytest.mark.parametrize("trained", [["embed_tokens", "lm_head"], ["embed_tokens"]], ids=["both", "input"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embeddings_that_were_resized_and_trained_fully(tied, trained, tmp_path):
    # PEFT saves them three times: as trained, the same as a part of its wrapper, and as they were before training.
    base = save_base(tmp_path / "base", llama(tie_word_embeddings=tied))
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(131)
    settings = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=trained, init_lora_weights=False)
    tuned = get_peft_model(model, settings)
    torch.manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "modules_to_save" in name:
            parameter.data.add_(torch.randn_like(parameter))
    tuned.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(name.endswith("embed_tokens.modules_to_save.weight") for name in saved)
    expected, plain = logits(tuned), tuned.merge_and_unload()
    result = merge_adapter(MergeSource(tmp_path / "adapter", str(base)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == 131 and result.untied == tied
    assert_equal(merged, plain)
    assert torch.allclose(logits(merged), expected, atol=1e-5)


@pytest.mark.parametrize("size", ["15KB", "90KB", "1GB"])
def test_shards_of_another_size(size, tmp_path):
    base = save_base(tmp_path / "base", mixtral())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], target_parameters=EXPERTS)
    result = merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged", size)
    limit = {"15KB": 15e3, "90KB": 90e3, "1GB": 1e9}[size]
    for path in (tmp_path / "merged").glob("*.safetensors"):
        weights = load_file(path)
        assert len(weights) == 1 or sum(weight.nbytes for weight in weights.values()) <= limit
    assert (result.shards == 1) == (size == "1GB")
    assert_equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), with_adapter(base, adapter).merge_and_unload()
    )


class Killed(Exception):
    pass


def test_an_interrupted_merge_continues(tmp_path):
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules="all-linear")
    source, to = MergeSource(adapter, str(base)), tmp_path / "merged"

    def kill(done, total):
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        merge_adapter(source, to, on_shard=kill)
    assert not (to / "config.json").exists() and not (to / "model.safetensors.index.json").exists()
    shards = sorted(to.glob("*.safetensors"))
    times = [path.stat().st_mtime_ns for path in shards]
    assert len(shards) == 3
    damaged = bytearray(shards[1].read_bytes())
    damaged[-1] ^= 1  # one bit
    shards[1].write_bytes(damaged)
    shards[2].with_name("model-00004-of-00005.safetensors.tmp").write_bytes(b"cut off")
    result = merge_adapter(source, to)
    assert result.resumed == 2
    assert [path.stat().st_mtime_ns == time for path, time in zip(shards, times)] == [True, False, True]
    assert not (to / "merge_progress.json").exists() and not list(to.glob("*.tmp"))
    assert_equal(AutoModelForCausalLM.from_pretrained(to), with_adapter(base, adapter).merge_and_unload())


def test_an_unfinished_merge_of_another_adapter_is_not_continued(tmp_path):
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])

    def kill(done, total):
        raise Killed

    with pytest.raises(Killed):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged", on_shard=kill)
    other = save_adapter(tmp_path / "other", base, target_modules=["v_proj"])
    with pytest.raises(ModelError, match="unfinished merge of another adapter"):
        merge_adapter(MergeSource(other, str(base)), tmp_path / "merged")


def test_a_folder_with_other_files_is_refused(tmp_path):
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    with pytest.raises(ModelError, match="is not empty"):
        merge_adapter(MergeSource(adapter, str(base)), base)


def change(adapter, edit):
    path = adapter / "adapter_model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path)


def rename(old, new):
    return lambda weights: weights.update({new: weights.pop(old)})


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda weights: weights.update({Q.replace("q_proj", "x_proj"): torch.zeros(4, 32)}),
            "belong to no part.*x_proj",
        ),
        (lambda weights: weights.update({Q: torch.zeros(4, 16)}), "does not fit the base model.*q_proj"),
        (lambda weights: weights.pop(Q), "has no weights, or NaN, for model.layers.0.self_attn.q_proj"),
        (rename("base_model.model.lm_head.weight", "lm_head.weight"), "has no weight .*lm_head"),
    ],
    ids=["unmatched", "shape", "missing", "missing module"],
)
def test_weights_of_the_adapter_that_do_not_fit(edit, message, tmp_path):
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], modules_to_save=["lm_head"])
    change(adapter, edit)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("size", [0, 100])
def test_damaged_weights_of_the_adapter(size, tmp_path):
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match="adapter_model.safetensors is truncated or not a safetensors file"):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")


def test_a_checkpoint_without_a_weight_that_is_adapted(tmp_path):
    base = save_base(tmp_path / "base", llama(), max_shard_size="1GB")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    weights = load_file(base / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="has no weight for model.layers.1.self_attn.q_proj.weight"):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")


def test_pickled_weights_are_refused(tmp_path):
    base = save_base(tmp_path / "base", llama(), max_shard_size="1GB")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="adapter_model.bin in .* may be a pickle.*save_pretrained"):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")
    (adapter / "adapter_model.bin").rename(adapter / "adapter_model.safetensors")
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pytorch_model.bin in .* may be a pickle.*save_pretrained"):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "IA3"}, "adapter of type .*IA3"),
        ({"init_lora_weights": "pissa"}, "modified the base weights"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ],
)
def test_adapters_that_cannot_be_merged(keys, message, tmp_path):
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    with pytest.raises(ModelError, match=message):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")


@pytest.mark.parametrize(
    ("config", "targets", "without"),
    [(llama(), ["q_proj"], "q_proj"), (qwen2(), ["q_proj", "o_proj"], "o_proj")],  # only qwen2's q_proj has a bias
)
def test_a_bias_for_a_layer_without_one(config, targets, without, tmp_path):
    base = save_base(tmp_path / "base", config)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=targets, lora_bias=True)
    with pytest.raises(ModelError, match=f"lora_bias: true, but model.layers.0.self_attn.{without} has no bias in the"):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")


@pytest.mark.parametrize("size", ["", "5", "5XB", "0GB", "GB"])
def test_sizes_of_shards(size, tmp_path):
    from ebft.tools.export.checkpoint import parse_size

    assert parse_size("5GB") == 5 * 10**9 and parse_size("1.5 MiB") == 3 * 2**19 and parse_size("500mb") == 5 * 10**8
    if size != "5":  # bytes
        with pytest.raises(ModelError, match="--max-shard-size: invalid value"):
            parse_size(size)


def test_the_other_files(tiny_llama_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    adapter = save_adapter(tmp_path / "adapter", tiny_llama_dir, target_modules=["q_proj"])
    tokenizer.save_pretrained(adapter)
    merge_adapter(MergeSource(adapter, str(tiny_llama_dir), tokenizer=adapter), tmp_path / "merged")
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } <= names
    assert "merge_progress.json" not in names and "adapter_config.json" not in names
    merged = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged.chat_template == tokenizer.chat_template
    assert merged("def f(x):")["input_ids"] == tokenizer("def f(x):")["input_ids"]


@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_trained_on_quantised_weights(bits, tmp_path):
    functional = pytest.importorskip("bitsandbytes").functional
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    merge_adapter(MergeSource(adapter, str(base), bits=bits, dtype=torch.bfloat16), tmp_path / "merged")
    expected = with_adapter(base, adapter)
    for name, module in expected.named_modules():
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and "lm_head" not in name:
            weight = module.weight.data.bfloat16()
            if bits == 4:
                weight = functional.dequantize_4bit(
                    *functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
                )
            else:
                quantised, scale, _ = functional.int8_vectorwise_quant(weight.half())
                weight = functional.int8_vectorwise_dequant(quantised, scale)
            assert not torch.equal(module.weight.data, weight.float())
            module.weight.data = weight.float()
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), expected.merge_and_unload())


def test_without_bitsandbytes_an_adapter_on_quantised_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    with pytest.raises(ModelError, match="requires the package bitsandbytes.*load_in_4bit=false"):
        merge_adapter(MergeSource(adapter, str(base), bits=4), tmp_path / "merged")


def test_a_base_that_is_stored_quantised_is_refused(tmp_path):
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    path = base / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    with pytest.raises(ModelError, match="stored quantised .bitsandbytes"):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")
