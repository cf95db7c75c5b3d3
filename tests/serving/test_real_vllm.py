"""`ebft vllm-serve` with a real vLLM, whose interpreter EBFT_VLLM_PYTHON names (make test-vllm)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from ebft.serving.command import RANKS, server_command
from tests.serving.processes import alive, free_port

PYTHON = os.environ.get("EBFT_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason="EBFT_VLLM_PYTHON names no interpreter with vLLM"),
]
READY_WITHIN = 300
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tiny_tokenizer_dir, tmp_path_factory):
    """A random Llama with the smallest heads that vLLM's attention on CPU takes."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), head_dim=32, max_position_embeddings=128, **shape, **special)
    folder = tmp_path_factory.mktemp("served-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Serving:
    """The command, its one line, and the processes it started."""

    def __init__(self, process, line, url, log):
        self.process, self.line, self.url, self.log = process, line, url, log
        self.supervisor, self.api_server, *self.workers = psutil.Process(process.pid).children(recursive=True)

    @property
    def pids(self):
        return [child.pid for child in (self.supervisor, self.api_server, *self.workers)]

    def post(self, path, **body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read()


def write_config(folder, base_model, extra=""):
    data = "datasets: [{path: unused, type: completion}]\n"
    text = f"base_model: {base_model}\nrl: ebft\ntrl: {{use_vllm: true}}\noutput_dir: {folder}/out\n"
    (folder / "run.yaml").write_text(text + data + extra)
    return str(folder / "run.yaml")


@pytest.fixture
def serve(model, tmp_path):
    """`serve()`: the command on the tiny model, ready; ended after the test."""
    started = []

    def serve(*overrides):
        lora = "adapter: lora\nlora_r: 12\nlora_alpha: 16\nlora_target_linear: true\n"
        path = write_config(tmp_path, model, lora)
        port = free_port()
        overrides = [f"vllm.python={PYTHON}", f"vllm.port={port}", "vllm.max_model_len=128", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ebft", "vllm-serve", path, *overrides]
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        line = process.stdout.readline()
        assert time.monotonic() - began < READY_WITHIN
        return Serving(process, line, f"http://127.0.0.1:{port}", tmp_path / "out" / "vllm.log")

    yield serve
    for process in started:
        process.terminate()
        process.communicate()


def test_it_serves_and_ends_with_ctrl_c(serve, model):
    serving = serve()
    ready = f"vLLM is serving {model} at {serving.url} (LoRA up to rank 16). Press Ctrl-C to stop it.\n"
    assert serving.line == ready
    assert any("EngineCore" in word for worker in serving.workers for word in worker.cmdline())
    answer = serving.post("/v1/completions", model=str(model), prompt=PROMPT, max_tokens=4, return_token_ids=True)
    choice = json.loads(answer)["choices"][0]
    assert choice["prompt_token_ids"] == PROMPT and 1 <= len(choice["token_ids"]) <= 4
    serving.process.send_signal(signal.SIGINT)
    rest = serving.process.communicate(timeout=60)[0]
    assert serving.process.returncode == 130 and rest == ""
    assert alive(serving.pids) == []


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
