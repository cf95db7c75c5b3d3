"""The oracle on a GPU: float32 as strict as on CPU, bfloat16 within rounding."""

import copy
import json
import math

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.import_utils import enable_tf32

from ebft import load_config, strided, train, transformers_internals
from ebft.prefix.attention import passes, tiles
from tests.golden.runs import write_inputs
from tests.strided.families import tiny_model
from tests.strided.oracle import options_of, oracle_step
from tests.strided.test_exactness import BASE, ENDS, compare, unequal_batch
from tests.structured.conftest import lora

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# The ways to a gradient: tiles in a second forward, tiles in the pass that sampled, the compiled kernel, CUDA graphs.
WAYS = {"tiles": {}, "single pass": {"single_pass": True}, "flex": {}, "recorded": {"cuda_graphs": True}}
MATRIX = lambda *families: pytest.mark.parametrize(("family", "way"), [(f, way) for f in families for way in WAYS])


def on_gpu(tmp_path, model, way="tiles"):
    (model.get_base_model() if isinstance(model, PeftModel) else model).generation_config.eos_token_id = ENDS
    args = strided.StridedEBFTConfig(output_dir=str(tmp_path), report_to=[], seed=3, **BASE, **WAYS[way])
    if way == "flex":
        model.set_attn_implementation("flex_attention")
    inputs, rows = unequal_batch()
    inputs = {name: value.cuda() for name, value in inputs.items()}
    rows = [(ids.cuda(), prompt, targets) for ids, prompt, targets in rows]
    return strided.StridedEBFTTrainer(model=model, args=args), inputs, rows


@MATRIX("llama", "gemma2", "gpt_oss", "qwen3")
def test_float32(family, way, tmp_path):
    model = lora(tiny_model(family, head_dim=16)).cuda()  # the compiled kernel takes no smaller heads
    plain = copy.deepcopy(model)
    trainer, inputs, rows = on_gpu(tmp_path, model, way)
    compare(trainer, plain, inputs, rows)


@MATRIX("llama", "gemma2", "qwen3")
def test_bfloat16(family, way, tmp_path):
    model = tiny_model(family, head_dim=16).to("cuda", torch.bfloat16)
    plain = copy.deepcopy(model).float().eval()
    trainer, inputs, rows = on_gpu(tmp_path, model, way)
    loss, out = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    loss.backward()
    expected = oracle_step(plain, rows, out.rollouts, options_of(trainer.args, ENDS))
    differences = [(out.logps[r, j, b, : len(x)] - x).abs().max() for (r, b, j), x in expected.logps.items()]
    assert torch.stack(differences).median() < 0.15
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


FLAGS = {"tf32": {"tf32": True, "bf16": False}, "float32": {"bf16": False}, "bf16": {"bf16": True}}
FLAGS |= {"fp16": {"fp16": True, "bf16": False}, "flash": {"flash_attention": True, "bf16": True}}
FLAGS["flex"] = {"flex_attention": True, "bf16": True}


@pytest.mark.parametrize(("flags", "size"), [*((name, 64) for name in FLAGS), ("bf16", 512), ("float32", 512)])
@pytest.mark.parametrize("run", ["strided_lora", "structured_single_turn", "sft"])
def test_runs_with_flags_of_a_gpu(run, flags, size, tmp_path):
    """Losses are finite, with grouped heads of a size."""
    path = write_inputs(run, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "model", head_dim=size, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    keys = {"max_steps": 2, "sample_packing": run == "sft", **FLAGS[flags]}
    try:
        trainer = train(load_config(path, [f"{key}={json.dumps(value)}" for key, value in keys.items()])).trainer
    finally:
        torch.backends.fp32_precision = "none"
        enable_tf32.cache_clear()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 256), (torch.bfloat16, 512)]
)
def test_grouped_heads_keep_no_scores(dtype, size):
    tokens = 8192
    parts = [torch.randn(*heads, tokens, size, device="cuda", dtype=dtype) for heads in ((2, 4), (2,), (2,))]
    parts = [x.requires_grad_() for x in parts]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pattern = passes.MaskPattern(transformers_internals.causal_mask_function)
    passes.document_attention([(0, tokens)], *parts, pattern, tiles.AttentionScores(size**-0.5), None).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8 * tokens**2 * dtype.itemsize
