"""The oracle on a GPU: float32 as strict as on CPU, bfloat16 within rounding."""

import copy

import pytest
import torch

from ebft.strided import StridedEBFTConfig, StridedEBFTTrainer
from tests.strided.families import tiny_model
from tests.strided.oracle import oracle_step
from tests.strided.test_exactness import BASE, compare, unequal_batch, with_lora

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# The three ways to a gradient: tiles in a second forward, tiles in the pass that sampled, the compiled kernel.
WAYS = {"tiles": {}, "single pass": {"single_pass": True}, "flex": {}}
MATRIX = lambda *families: pytest.mark.parametrize(("family", "way"), [(f, way) for f in families for way in WAYS])


def on_gpu(tmp_path, model, way="tiles"):
    args = StridedEBFTConfig(output_dir=str(tmp_path), report_to=[], seed=3, **BASE, **WAYS[way])
    if way == "flex":
        model.set_attn_implementation("flex_attention")
    inputs, rows = unequal_batch()
    inputs = {name: value.cuda() for name, value in inputs.items()}
    rows = [(ids.cuda(), prompt, targets) for ids, prompt, targets in rows]
    return StridedEBFTTrainer(model=model, args=args), inputs, rows


@MATRIX("llama", "gemma2", "gpt_oss", "qwen3")
def test_float32(family, way, tmp_path):
    model = with_lora(tiny_model(family, head_dim=16)).cuda()  # the compiled kernel takes no smaller heads
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
    expected = oracle_step(plain, rows, out.rollouts, trainer.args)
    differences = [(out.logps[r, j, b] - x).abs().max() for (r, b, j), x in expected.logps.items()]
    assert torch.stack(differences).median() < 0.15
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
