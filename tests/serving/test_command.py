"""Command lines, environments, addresses, interpreters and GPUs of servers, rank limits and slots for adapters."""

import json
import sys
import warnings

import pytest

from ebft.catalog import MODELS, cached_folder, mark_fetched
from ebft.config.keys.serving import base_url
from ebft.errors import ConfigError, ModelError
from ebft.serving.command import device_environment, find_interpreter, max_lora_rank, server_command

PYTHON = "/env/bin/python"


def command(config, gpus=0, environ=None):
    with warnings.catch_warnings(action="error"):
        return server_command(config.server_settings, PYTHON, gpus, environ or {})


def value(command, flag):
    return command.command[command.command.index(flag) + 1]


def test_a_model_without_adapter(make_config):
    made = command(make_config(seed=7))
    assert " ".join(made.command) == (
        "/env/bin/python -m vllm.entrypoints.openai.api_server --model nowhere/model --host 127.0.0.1 --port 8000 "
        "--dtype float32 --seed 7 --logprobs-mode processed_logprobs --language-model-only"
    )
    assert made.environment == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert (made.model, made.url, made.max_lora_rank) == ("nowhere/model", "http://127.0.0.1:8000", None)
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


@pytest.mark.parametrize(("keys", "saved", "limit"), [
    *(({"lora_r": r}, None, limit) for r, limit in ((1, 1), (2, 8), (16, 16), (17, 32), (300, 320), (512, 512))),
    ({}, {"r": 12}, 16), ({}, {"r": 8, "rank_pattern": {"q_proj": 40}, "modules_to_save": None}, 64),
    ({"lora_r": 600}, None, 600),  # vLLM refuses it
    ({"lora_modules_to_save": ["lm_head"]}, None, r"lora_modules_to_save.*lm_head.*trl.use_vllm: false"),
])  # fmt: skip
def test_the_smallest_limit_that_holds_the_adapter(make_config, tmp_path, keys, saved, limit):
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    config = make_config(adapter="lora", **({"lora_model_dir": str(tmp_path)} if saved else keys))
    if isinstance(limit, int):
        assert max_lora_rank(config) == limit
    else:
        with pytest.raises(ConfigError, match=limit):
            max_lora_rank(config)


def test_every_key_arrives(make_config):
    keys = {"host": "10.0.0.5", "port": 8123, "tensor_parallel_size": 2, "data_parallel_size": 3}
    keys |= {"gpu_memory_utilization": 0.5, "dtype": "bfloat16", "max_model_len": 2048}
    keys |= {"worker_extension_cls": "my.Extension", "reasoning_parser": "qwen3"}
    switches = {"enable_prefix_caching": True, "enforce_eager": True}
    model = {"revision_of_model": "v1", "tokenizer_config": "nowhere/tokenizer", "base_model_config": "nowhere/config"}
    made = command(make_config(vllm=keys | switches, trust_remote_code=True, **model), gpus=8)
    for key, given in keys.items():
        assert value(made, f"--{key.replace('_', '-')}") == str(given)
    assert {"--enable-prefix-caching", "--enforce-eager", "--trust-remote-code"} <= set(made.command)
    flags = ("--revision", "--tokenizer", "--hf-config-path")
    assert [value(made, flag) for flag in flags] == ["v1", "nowhere/tokenizer", "nowhere/config"]


def test_a_server_that_others_can_change_gives_a_warning(make_config):
    config = make_config(adapter="lora", lora_r=8, vllm={"host": "0.0.0.0"})
    with pytest.warns(UserWarning, match="vllm.host: 0.0.0.0 accepts connections from other.*replace the model"):
        server_command(config.server_settings, PYTHON, 0, {})


def test_where_it_is_reached(make_config):
    urls = {"::1": "http://[::1]:80", "::": "http://[::1]:80", "": "http://127.0.0.1:80", "box": "http://box:80"}
    assert {host: base_url(host, 80) for host in urls} == urls
    made = command(make_config(vllm={"host": "0.0.0.0"}, trl={"vllm_server_port": 8001}))
    assert made.url == "http://127.0.0.1:8001" and value(made, "--host") == "0.0.0.0" and made.port == 8001
    assert command(make_config(trl={"vllm_server_port": 8001}, vllm={"port": 8000})).port == 8000


def test_local_and_fetched_models_are_named_by_their_folders(make_config, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EBFT_CACHE", str(tmp_path))
    made = command(make_config(base_model="model", tokenizer_config="./model"))
    assert value(made, "--model") == made.model == value(made, "--tokenizer") == str(tmp_path / "model")
    with pytest.raises(ModelError, match="Run `ebft fetch smollm2-135m` first"):
        command(make_config(base_model="smollm2-135m"))
    folder = cached_folder("smollm2-135m")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    mark_fetched(folder, MODELS["smollm2-135m"])
    assert value(command(make_config(base_model="smollm2-135m")), "--model") == str(folder)


def test_a_gguf_file_is_refused(make_config):
    """Another model of the same folder would be served."""
    with pytest.raises(ConfigError, match="vLLM requires a folder"):
        command(make_config(gguf_file="a.gguf", trl={"vllm_mode": "server"}))


def test_the_users_environment_wins(make_config):
    config = make_config(vllm={"env": {"VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_LOGGING_LEVEL": "DEBUG"}})
    assert command(config).environment == {"VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_LOGGING_LEVEL": "DEBUG"}
    assert command(make_config(), environ={"VLLM_CPU_KVCACHE_SPACE": "8"}).environment == {}


NAMED = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(("vllm", "processes", "gpus", "visible", "expected"), [
    ({}, 1, 2, None, "1"), ({}, 1, 4, None, "3"),  # the last
    ({"tensor_parallel_size": 2}, 2, 4, None, "2,3"),
    ({"tensor_parallel_size": 2, "data_parallel_size": 2}, 1, 8, None, "4,5,6,7"),
    ({}, 1, 3, "GPU-a,GPU-b,GPU-c", "GPU-c"),
    ({}, 1, 2, "0,1,-1,2", "1"),  # CUDA stops at the first that is none
    ({}, 1, 0, None, None),  # nothing to divide
    ({"device": "cpu"}, 1, 2, None, None), ({"env": {NAMED: "0"}}, 1, 1, None, None),
    ({}, 1, 1, None, ConfigError), ({}, 4, 4, None, ConfigError), ({"data_parallel_size": 3}, 2, 4, None, ConfigError),
])  # fmt: skip
def test_the_server_gets_the_last(make_config, vllm, processes, gpus, visible, expected):
    given = make_config(vllm=vllm).vllm, processes, gpus, {NAMED: visible} if visible else {}
    if expected is ConfigError:
        with pytest.raises(ConfigError, match="vllm_mode: colocate"):
            device_environment(*given)
    else:
        assert device_environment(*given) == ({NAMED: expected} if expected else {})


def test_ours_is_the_default_if_it_has_the_package_and_a_link_stays_a_link(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    assert find_interpreter(None) == sys.executable
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert find_interpreter("./python") == str(tmp_path / "python")
    monkeypatch.delenv("PYTHONPATH")
    (tmp_path / "vllm").mkdir()  # a folder of the user's own is not the package
    with pytest.raises(ConfigError, match="vLLM is not installed in .*pip install ebft.vllm..*set vllm.python"):
        find_interpreter(None)
