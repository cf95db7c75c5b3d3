"""Command lines and environments of several configs."""

import json
import warnings

import pytest

from ebft.catalog import MODELS, cached_folder, mark_fetched
from ebft.errors import ConfigError, ModelError
from ebft.serving.command import server_command

PYTHON = "/env/bin/python"
NO_ENVIRONMENT = {}


def command(config, gpus=0):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return server_command(config.server_settings, PYTHON, gpus, NO_ENVIRONMENT)


def value(command, flag):
    return command.command[command.command.index(flag) + 1]


def test_a_model_without_gpu_and_adapter(make_config):
    made = command(make_config(seed=7))
    assert " ".join(made.command) == (
        "/env/bin/python -m vllm.entrypoints.openai.api_server --model nowhere/model --host 127.0.0.1 --port 8000 "
        "--dtype float32 --seed 7 --logprobs-mode processed_logprobs"
    )
    assert made.environment == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert (made.model, made.host, made.port, made.max_lora_rank) == ("nowhere/model", "127.0.0.1", 8000, None)
    assert made.url == "http://127.0.0.1:8000"


def test_all_weights_on_a_gpu(make_config):
    made = command(make_config(), gpus=1)
    assert value(made, "--dtype") == "auto" and value(made, "--gpu-memory-utilization") == "0.9"
    assert json.loads(value(made, "--weight-transfer-config")) == {"backend": "nccl"}
    assert made.environment == {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_an_adapter(make_config, gpus):
    made = command(make_config(adapter="lora", lora_r=24, trl={"prefetch_depth": 2}), gpus)
    assert "--enable-lora" in made.command and "--weight-transfer-config" not in made.command
    assert value(made, "--max-lora-rank") == "32" and made.max_lora_rank == 32
    assert value(made, "--max-loras") == value(made, "--max-cpu-loras") == "4"
    assert made.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in made.environment


def test_every_key_arrives(make_config):
    keys = {
        "host": "10.0.0.5",
        "port": 8123,
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
        "gpu_memory_utilization": 0.5,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "worker_extension_cls": "my.Extension",
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "reasoning_parser": "qwen3",
    }
    model = {
        "revision_of_model": "v1",
        "trust_remote_code": True,
        "tokenizer_config": "nowhere/tokenizer",
        "base_model_config": "nowhere/config",
    }
    words = " ".join(command(make_config(vllm=keys, **model), gpus=8).command)
    for part in (
        "--host 10.0.0.5 --port 8123",
        "--tensor-parallel-size 2",
        "--data-parallel-size 3",
        "--gpu-memory-utilization 0.5",
        "--dtype bfloat16",
        "--max-model-len 2048",
        "--worker-extension-cls my.Extension",
        "--enable-prefix-caching",
        "--enforce-eager",
        "--reasoning-parser qwen3",
        "--revision v1",
        "--trust-remote-code",
        "--tokenizer nowhere/tokenizer",
        "--hf-config-path nowhere/config",
    ):
        assert part in words


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_that_others_can_change_gives_a_warning(make_config, host):
    config = make_config(adapter="lora", lora_r=8, vllm={"host": host})
    with pytest.warns(UserWarning, match=f"vllm.host: {host} accepts connections from other machines.*adapters"):
        server_command(config.server_settings, PYTHON, 0, NO_ENVIRONMENT)
    command(make_config(vllm={"host": host}))  # its weights cannot be changed


def test_switches_that_are_off(make_config):
    config = make_config(vllm={"enable_prefix_caching": False, "enforce_eager": False, "enable_reasoning": False})
    words = command(config).command
    assert "--no-enable-prefix-caching" in words and "--enforce-eager" not in words
    config = make_config(vllm={"enable_reasoning": False, "reasoning_parser": "qwen3"})
    assert "--reasoning-parser" not in command(config).command


def test_reasoning_needs_a_parser(make_config):
    with pytest.raises(ConfigError, match="vllm.reasoning_parser, for example to qwen3"):
        command(make_config(vllm={"enable_reasoning": True}))


def test_which_port(make_config):
    assert command(make_config(trl={"vllm_server_port": 8001})).port == 8001
    assert command(make_config(trl={"vllm_server_port": 8001}, vllm={"port": 8000})).port == 8000


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("box", "http://box:8000")],
)
def test_where_it_is_reached(make_config, host, url):
    made = command(make_config(vllm={"host": host}))
    assert made.url == url and value(made, "--host") == host


def test_a_local_model_is_named_by_its_absolute_path(make_config, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    made = command(make_config(base_model="model", tokenizer_config="./model"))
    assert value(made, "--model") == made.model == value(made, "--tokenizer") == str(tmp_path / "model")


def test_a_fetched_model_is_named_by_its_folder(make_config, tmp_path, monkeypatch):
    monkeypatch.setenv("EBFT_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="Run `ebft fetch smollm2-135m` first"):
        command(make_config(base_model="smollm2-135m"))
    folder = cached_folder("smollm2-135m")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    mark_fetched(folder, MODELS["smollm2-135m"])
    assert value(command(make_config(base_model="smollm2-135m")), "--model") == str(folder)


@pytest.mark.parametrize("keys", [{"gguf_file": "a.gguf"}, {"base_model": "nowhere/model/a.gguf"}])
def test_a_gguf_file_is_refused(make_config, keys):
    config = make_config(**keys, trl={"vllm_mode": "server"})  # trains with a server of another name
    with pytest.raises(ConfigError, match="vLLM requires a folder.*`ebft fetch nowhere/model/a.gguf --output DIR`"):
        command(config)


def test_the_users_environment_wins(make_config):
    config = make_config(vllm={"env": {"VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_LOGGING_LEVEL": "DEBUG"}})
    assert command(config).environment == {"VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_LOGGING_LEVEL": "DEBUG"}
    made = server_command(make_config().server_settings, PYTHON, 0, {"VLLM_CPU_KVCACHE_SPACE": "8"})
    assert made.environment == {}


def test_the_device(make_config):
    made = command(make_config(vllm={"device": "cpu"}), gpus=2)
    assert "--gpu-memory-utilization" not in made.command and made.environment["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(ConfigError, match="vllm.device: cuda requires a GPU, but none is available"):
        command(make_config(vllm={"device": "cuda"}))


@pytest.mark.parametrize(("key", "given"), [("serve_module", "my.server"), ("device", "tpu")])
def test_a_key_without_effect_is_one_warning(make_config, key, given):
    with pytest.warns(UserWarning) as caught:
        server_command(make_config(vllm={key: given}).server_settings, PYTHON, 0, NO_ENVIRONMENT)
    assert len(caught) == 1 and str(caught[0].message).startswith(f"vllm.{key}: {given} has no effect")
