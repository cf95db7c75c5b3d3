"""The merged model is equal to the one of PEFT's merge_and_unload, for all kinds of adapters, models and shards."""

import json
import os
import shutil
from pickle import UnpicklingError

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, Mxfp4Config

from ebft.config.keys.models import ModelSettings
from ebft.errors import ModelError
from ebft.models.pretrained import pretrained_model
from ebft.tools.export.checkpoint import _NAMES, write_tensors
from ebft.tools.export.merge import MergeSource, adapter_in_folder, merge_adapter
from tests.export.models import gpt2, gpt_oss, llama, logits, mixtral, qwen2, save_adapter, save_base, with_adapter
from tests.file_edits import as_mxfp4, named, pickled, settings, tensors
from tests.models.multimodal import MULTIMODAL, save_multimodal, text_logits

# PEFT remarks on adapters that are as unusual as these.
pytestmark = pytest.mark.filterwarnings(r"ignore:::(.*/)?peft\b")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TIED = {"tie_word_embeddings": True}
VARIANTS = {
    "lora": (llama(), ["q_proj", "v_proj"], {}),
    "patterns": (llama(), "all-linear", {"rank_pattern": {"q_proj": 2}, "use_rslora": True}),
    "dora": (llama(), "all-linear", {"use_dora": True}), "embedding": (llama(), ["embed_tokens", "lm_head"], {}),
    "tied_modules_to_save": (llama(**TIED), ["q_proj"], {"modules_to_save": ["lm_head"]}),
    "tied_saved_together": (
        llama(**TIED), ["q_proj"], {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "bias_all": (qwen2(), ["q_proj"], {"bias": "all"}), "lora_bias": (qwen2(), ["q_proj"], {"lora_bias": True}),
    "conv1d": (gpt2(), ["c_attn", "c_fc"], {}), "experts": (mixtral(), ["q_proj"], {"target_parameters": EXPERTS}),
    "experts_by_module_names": (mixtral(), ["w1", "w2", "w3"], {}),
}  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """`saved(config, targets, **settings)`: the folders of a base model and of an adapter on it."""

    def save(config=None, targets=("q_proj",), max_shard_size="40KB", **settings):
        targets = targets if isinstance(targets, str) else [*targets]
        base = save_base(tmp_path / "base", config or llama(), max_shard_size=max_shard_size)
        return base, save_adapter(tmp_path / "adapter", base, target_modules=targets, **settings)

    return save


def assert_equal(model, expected):
    own, other = model.state_dict(), expected.state_dict()
    assert own.keys() == other.keys()
    is_same = lambda mine, theirs: mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert [name for name in own if not is_same(own[name], other[name])] == []


@pytest.mark.first(6)
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((name, torch.float32) for name in VARIANTS), ("dora", torch.bfloat16), ("experts", torch.bfloat16)],
)
def test_the_result_is_that_of_peft(variant, dtype, tmp_path):
    config, targets, settings = VARIANTS[variant]
    base = save_base(tmp_path / "base", config, dtype)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=targets, **settings)
    merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    unmerged = with_adapter(base, adapter)
    expected = logits(unmerged)
    assert_equal(merged, unmerged.merge_and_unload())
    assert (logits(AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 1e-3
    if dtype == torch.float32:
        assert torch.allclose(logits(merged), expected, atol=1e-5)


def test_weights_in_mxfp4_become_bfloat16_in_shards_of_another_size(tmp_path):
    base = save_base(tmp_path / "base", gpt_oss(), torch.bfloat16, "1GB")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], target_parameters=EXPERTS[:1])
    assert as_mxfp4(base)
    result = merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged", "4KB")
    shards = [load_file(path).values() for path in (tmp_path / "merged").glob("*.safetensors")]
    assert len(shards) == result.shards > 4
    assert all(len(shard) == 1 or sum(weight.nbytes for weight in shard) <= 4e3 for shard in shards)
    dense = AutoModelForCausalLM.from_pretrained(base, quantization_config=Mxfp4Config(dequantize=True))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_equal(merged, PeftModel.from_pretrained(dense, adapter).merge_and_unload())
    assert "quantization_config" not in (tmp_path / "merged/config.json").read_text()


@pytest.mark.parametrize("kind", sorted(MULTIMODAL.keys() - {"mistral3"}))  # which has no q_proj
@pytest.mark.filterwarnings("ignore:.*the text model of a multimodal model is loaded")
def test_an_adapter_of_a_text_model_is_merged_into_the_whole_model(kind, tmp_path):
    whole = save_multimodal(kind, tmp_path / "base")
    experts = ["experts.gate_up_proj", "experts.down_proj"] if kind == "gemma4" else None
    lora = LoraConfig(target_modules=["q_proj"], target_parameters=experts)
    adapted = get_peft_model(pretrained_model(str(tmp_path / "base")), lora)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(adapter_in_folder(tmp_path / "adapter"), tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert torch.allclose(text_logits(merged), text_logits(adapted), atol=1e-4)
    assert (text_logits(whole) - text_logits(merged)).abs().max() > 1e-2
    own = merged.state_dict()
    changed = [name for name, weight in whole.state_dict().items() if not torch.equal(weight, own[name])]
    assert changed and not [name for name in changed if "q_proj" not in name and "experts" not in name]
    assert not [name for name in changed if "vision" in name]


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "both"])
def test_tied_weights(target, saved, tmp_path):
    """Where one is adapted, both are written; a change of both is merged once. PEFT changes both, and adds it twice."""
    targets = {"targets": ["embed_tokens"], "ensure_weight_tying": True} if target == "both" else {}
    base, adapter = saved(llama(**TIED), **(targets or {"targets": ["q_proj", target]}))
    result = merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), logits(with_adapter(base, adapter)), atol=1e-5)
    assert result.untied == (target != "both") == (not merged.config.tie_word_embeddings)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == (target == "both")
    if target != "both":
        plain = AutoModelForCausalLM.from_pretrained(base).model.embed_tokens.weight
        other = merged.lm_head if target == "embed_tokens" else merged.model.embed_tokens
        assert torch.equal(other.weight, plain)


@pytest.mark.parametrize("max_shard_size, zipped", [("40KB", True), ("1GB", False)])  # False: as before PyTorch 1.6
def test_the_result_from_pickles_is_that_from_safetensors(zipped, max_shard_size, saved, tmp_path):
    base, adapter = saved(mixtral(), max_shard_size=max_shard_size, target_parameters=EXPERTS)
    source = MergeSource(adapter, str(base))
    merge_adapter(source, tmp_path / "expected")
    for path in [*base.glob("*.safetensors"), adapter / WEIGHTS.partition("/")[2]]:
        pickled(path.name, zipped)(path.parent)
    merge_adapter(source, tmp_path / "merged")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("expected", "merged")]
    assert files[0] == files[1] and len(files[0]) > (2 if max_shard_size == "1GB" else 4)


def test_an_interrupted_merge_continues(saved, tmp_path):
    def killed_at_the_second(done, total):
        if done == 2:
            raise KeyboardInterrupt

    base, adapter = saved(targets="all-linear")
    source, to = MergeSource(adapter, str(base)), tmp_path / "merged"
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(source, to, on_shard=killed_at_the_second)
    assert not (to / "config.json").exists() and not (to / "model.safetensors.index.json").exists()
    shards = sorted(to.glob("*.safetensors"))
    times = [path.stat().st_mtime_ns for path in shards]
    assert len(shards) == 2
    shards[1].with_name(f"{shards[1].name.replace('00002', '00003')}.tmp").write_bytes(b"cut off")
    result = merge_adapter(source, to)
    assert result.resumed == 2 < result.shards
    assert [path.stat().st_mtime_ns for path in shards] == times
    assert not (to / "merge_progress.json").exists() and not list(to.glob("*.tmp"))
    assert_equal(AutoModelForCausalLM.from_pretrained(to), with_adapter(base, adapter).merge_and_unload())


CONFIG, WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
QUANTISED = settings("base/config.json", quantization_config={"quant_method": "bitsandbytes"})


@pytest.mark.parametrize(("edit", "message"), [
    (tensors(lambda found: {**found, Q.replace("q_", "x_"): torch.zeros(4, 32)}, WEIGHTS), "not in this base.*x_proj"),
    (named(lambda key: key * (key != Q), WEIGHTS), "has no weights, or NaN, for model.layers.0.self_attn.q_proj"),
    (named(lambda key: key * ("1.self_attn.q_proj" not in key), "base/model.safetensors"),
     "has no weight for model.layers.1.self_attn.q_proj.weight"),
    (pickled("base/model.safetensors", code=os.system), "posix.system.*reading .*pytorch_model.bin"),
    (settings(CONFIG, init_lora_weights="pissa"), "modified the base weights"),
    (settings(CONFIG, layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    (QUANTISED, "are quantised .bitsandbytes"),
])  # fmt: skip
def test_what_cannot_be_merged(edit, message, saved, tmp_path):
    base, adapter = saved(max_shard_size="1GB", modules_to_save=["lm_head"])
    edit(tmp_path)
    with pytest.raises((ModelError, UnpicklingError), match=f"(?s){message}"):
        merge_adapter(MergeSource(adapter, str(base)), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


PLAIN, FP4 = {"bnb_4bit_use_double_quant": False}, {"bnb_4bit_quant_type": "fp4"}


@pytest.mark.parametrize("bits, experts, kwargs", [(8, False, {}), (8, True, {}), (4, False, FP4), (4, True, PLAIN)])
def test_an_adapter_trained_on_quantised_weights(bits, experts, kwargs, saved, tmp_path):
    functional = pytest.importorskip("bitsandbytes").functional
    base, adapter = saved(mixtral(), target_parameters=EXPERTS) if experts else saved()
    keys = {"quantize_moe_experts": experts, "bnb_config_kwargs": kwargs, "torch_dtype": "bfloat16"}
    settings = ModelSettings(base_model="base", load_in_4bit=bits == 4, load_in_8bit=bits == 8, **keys)
    merge_adapter(MergeSource(adapter, str(base), quantised=settings), tmp_path / "merged")
    options = {"quant_type": "fp4" if kwargs is FP4 else "nf4", "compress_statistics": kwargs is not PLAIN}
    expected = with_adapter(base, adapter)
    weights = [each for each in expected.parameters() if each.dim() == 3] if experts else []
    own = [module for name, module in expected.named_modules() if "lora_" not in name and "lm_head" not in name]
    weights += [module.weight for module in own if isinstance(module, torch.nn.Linear)]
    for weight in weights:
        before = weight.data.bfloat16()
        if bits == 4:
            weight.data = functional.dequantize_4bit(*functional.quantize_4bit(before, **options)).float()
        else:
            quantised, scale, _ = functional.int8_vectorwise_quant(before.half().flatten(0, -2))
            weight.data = functional.int8_vectorwise_dequant(quantised, scale).view(before.shape)
            weight.data = weight.data.bfloat16().float() if weight.dim() == 3 else weight.data
        assert not torch.equal(weight.data, before.float())
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), expected.merge_and_unload())


def test_the_other_files(tiny_llama_dir, tmp_path):
    """The tokenizer of the adapter, the configuration that its run trained with, and no records of the base's run."""
    base, tokenizer = shutil.copytree(tiny_llama_dir, tmp_path / "base"), AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    tokenizer.save_pretrained(adapter)
    records = {"run.json", "metrics.jsonl", "rollouts-rank1.jsonl.2", "ebft_run.json", "trainer_state.json"}
    for name in records:
        (base / name).write_text("{}")
    (base / "LICENSE.txt").write_text("of the weights")
    longer = AutoConfig.from_pretrained(base)
    longer.max_position_embeddings *= 4
    longer.save_pretrained(tmp_path / "longer")
    (adapter / "run.json").write_text(json.dumps({"config": {"base_model_config": str(tmp_path / "longer")}}))
    merge_adapter(adapter_in_folder(adapter, str(base)), tmp_path / "merged")
    merged = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged.chat_template == tokenizer.chat_template
    assert merged("def f(x):")["input_ids"] == tokenizer("def f(x):")["input_ids"]
    positions = AutoConfig.from_pretrained(tmp_path / "merged").max_position_embeddings
    assert positions == longer.max_position_embeddings
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"generation_config.json", "LICENSE.txt"} <= names
    assert not names & {*records, "merge_progress.json", "adapter_config.json"}


def test_the_folder_of_a_run_on_quantised_weights_needs_its_config(saved):
    _, adapter = saved()
    (adapter / "ebft_run.json").write_text(json.dumps({"adapter": "lora", "settings": {"load_in_8bit": True}}))
    with pytest.raises(ModelError, match="was trained on quantised weights. Give the config of its run"):
        adapter_in_folder(adapter)


def test_safetensors_reads_what_is_written_in_any_order(tmp_path):
    """One tensor of each dtype, among them a scalar, an empty one and one that is not contiguous."""
    bits = torch.arange(15).reshape(3, 5) % 2
    tensors = {name: bits.to(dtype) for dtype, name in _NAMES.items() if "FNUZ" not in name}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "transposed": torch.randn(4, 6).T}
    layout = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_tensors(tmp_path / "a.safetensors", layout, reversed(tensors.items()))
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        ours, theirs = (value.contiguous().flatten().view(torch.uint8) for value in (found[name], tensor))
        assert ours.equal(theirs), name
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
