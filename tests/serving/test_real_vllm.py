"""The flags of a server against a real vLLM, whose interpreter EBFT_VLLM_PYTHON names (make test-vllm)."""

import os
import re
import subprocess

import pytest

from ebft.serving.command import RANKS, server_command

PYTHON = os.environ.get("EBFT_VLLM_PYTHON")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(PYTHON is None, reason="EBFT_VLLM_PYTHON names no interpreter")]


def test_it_knows_every_flag_and_rank(make_config):
    module = "vllm.entrypoints.openai.api_server"
    page = subprocess.run([PYTHON, "-m", module, "--help=all"], capture_output=True, text=True, check=True).stdout
    keys = {"tensor_parallel_size": 2, "data_parallel_size": 2, "max_model_len": 64, "worker_extension_cls": "a.B"}
    keys |= {"enforce_eager": True, "reasoning_parser": "qwen3"}
    model = {"revision_of_model": "v1", "trust_remote_code": True, "tokenizer_config": "a", "base_model_config": "a"}
    for caching, adapter in ((True, {"adapter": "lora"}), (False, {})):
        config = make_config(vllm={**keys, "enable_prefix_caching": caching}, **model, **adapter)
        command = server_command(config.server_settings, PYTHON, gpus=8).command
        flags = [word for word in command if word.startswith("--")]
        assert [flag for flag in flags if not re.search(rf"^\s+(--\S+,? )*{flag}\b", page, re.MULTILINE)] == []
    assert f"--max-lora-rank {{{','.join(map(str, RANKS))}}}" in page
