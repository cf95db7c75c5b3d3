"""Structured EBFT on a GPU: loss and gradients of the CPU's oracle, over generate() and over a vLLM server."""

import os

import pytest
import torch
from torch.nn import functional as F

from tests.structured import conftest, trainers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("whitening", [False, True])
def test_loss_and_gradients_are_those_of_single_sequences(chat_tokenizer, build, whitening):
    trainer = build(ce_coef=0.3, use_whitening=whitening, bf16=False, tf32=False)
    assert next(trainer.model.parameters()).is_cuda
    twin, base = conftest.lora(conftest.chat_model(chat_tokenizer)), conftest.chat_model(chat_tokenizer)
    _, gradients, expected = trainers.compare_step(trainer, twin, base, atol=1e-3)
    for name, gradient in expected.items():
        assert F.cosine_similarity(gradient.flatten(), gradients[name].cpu().flatten(), dim=0) > 0.999


@pytest.mark.skipif(os.environ.get("EBFT_VLLM_PYTHON") is None, reason="EBFT_VLLM_PYTHON names no vLLM")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a server and a trainer need a GPU each")
def test_full_fine_tuning_by_weight_transfer(tmp_path):
    from ebft import load_config, train
    from tests.serving.processes import free_port
    from tests.structured.real_text import make_base_model
    from tests.structured.test_vllm import differences, write_config

    config = write_config(tmp_path, make_base_model(tmp_path), free_port())
    without_adapter = ["adapter=", "lora_r=", "lora_alpha=", "lora_target_linear=", "trl.vllm_mode=managed"]
    history = train(load_config(config, without_adapter)).trainer.state.log_history
    assert len(differences(history)) == 3 and max(differences(history)) < 0.05
