"""The command line and environment of vLLM's OpenAI server, built from a run config."""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ebft.config.schema import RunConfig
from ebft.data.locate import base_name, lasting_name, locate
from ebft.errors import ConfigError
from ebft.fetch.models import MODELS, as_folder, is_gguf
from ebft.serving.address import base_url
from ebft.serving.devices import VISIBLE, serves_on_gpu

CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # GiB; if unset, vLLM uses a large part of the machine's memory
CPU_CACHE_GIB = "2"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM supports for --max-lora-rank


@dataclass(frozen=True)
class ServerCommand:
    """The command to start a server, and the server's address."""

    command: tuple[str, ...]
    environment: Mapping[str, str]  # in addition to the environment of the starting process
    model: str  # the name of the base model in requests
    host: str
    port: int
    max_lora_rank: int | None = None

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
        return base_url(self.host, self.port)


def server_command(config: RunConfig, python: str, gpus: int, environ: Mapping[str, str] = os.environ) -> ServerCommand:
    """Return the server command of `config` for the interpreter `python` and `gpus` visible GPUs.

    Raises ConfigError if vLLM cannot serve the config's model or adapter.
    """
    _warn_without_effect(config)
    _check_model(config)
    on_gpu = serves_on_gpu(config, gpus)
    model, port, rank = lasting_name(config.base_model), server_port(config), max_lora_rank(config)
    flags = [
        *("--model", model, "--host", config.vllm.host, "--port", str(port)),
        *_model_flags(config, on_gpu),
        *_engine_flags(config, on_gpu),
        *_weight_flags(config, rank, on_gpu),
    ]
    return ServerCommand(
        command=(python, "-m", "vllm.entrypoints.openai.api_server", *flags),
        environment=_environment(config, on_gpu, environ),
        model=model,
        host=config.vllm.host,
        port=port,
        max_lora_rank=rank,
    )


def server_port(config: RunConfig) -> int:
    """Return the port of the `vllm:` section if set, or else the one that the trainer connects to."""
    if "port" not in config.vllm.model_fields_set and config.trl.vllm_server_port is not None:
        return config.trl.vllm_server_port
    return config.vllm.port


def _check_model(config: RunConfig) -> None:
    """Raise an error for models that are not fetched, whose name vLLM would treat as a hub id, and for GGUF files."""
    if config.base_model in MODELS:
        locate(config.base_model, "model", "base_model")
    name = base_name(config.base_model, config.gguf_file)
    if is_gguf(name):
        raise ConfigError(f"base_model is a GGUF file, but vLLM requires a folder of safetensors. {as_folder(name)}")


def _model_flags(config: RunConfig, on_gpu: bool) -> list[str]:
    # For float32 weights, auto selects float16, which is slower and less precise on CPU.
    dtype = "float32" if config.vllm.dtype == "auto" and not on_gpu else config.vllm.dtype
    # Training requires the log-probabilities of the distribution used for sampling.
    flags = ["--dtype", dtype, "--seed", str(config.seed), "--logprobs-mode", "processed_logprobs"]
    if config.tokenizer_config:
        flags += ["--tokenizer", lasting_name(config.tokenizer_config)]
    if config.base_model_config:
        flags += ["--hf-config-path", lasting_name(config.base_model_config)]
    if config.revision_of_model:
        flags += ["--revision", config.revision_of_model]
    if config.trust_remote_code:
        flags += ["--trust-remote-code"]
    return flags


def _engine_flags(config: RunConfig, on_gpu: bool) -> list[str]:
    vllm = config.vllm
    flags = ["--gpu-memory-utilization", str(vllm.gpu_memory_utilization)] if on_gpu else []
    for key in ("max_model_len", "tensor_parallel_size", "data_parallel_size", "worker_extension_cls"):
        value = getattr(vllm, key)
        if value is not None:
            flags += ["--" + key.replace("_", "-"), str(value)]
    if vllm.enable_prefix_caching is not None:
        flags += ["--enable-prefix-caching" if vllm.enable_prefix_caching else "--no-enable-prefix-caching"]
    if vllm.enforce_eager:
        flags += ["--enforce-eager"]
    return flags + _reasoning_flags(config)


def _reasoning_flags(config: RunConfig) -> list[str]:
    """Return the flag for the reasoning parser, which is also vLLM's only option to enable reasoning."""
    vllm = config.vllm
    if vllm.enable_reasoning and vllm.reasoning_parser is None:
        raise ConfigError(
            "vllm.enable_reasoning: true requires a parser for the model's reasoning. Set vllm.reasoning_parser, for "
            "example to qwen3, or remove enable_reasoning."
        )
    if vllm.reasoning_parser is None or vllm.enable_reasoning is False:
        return []
    return ["--reasoning-parser", vllm.reasoning_parser]


def _weight_flags(config: RunConfig, rank: int | None, on_gpu: bool) -> list[str]:
    """Return the flags for weight updates: adapters are loaded from files, full weights sent between GPUs."""
    if rank is not None:
        slots = str(adapter_slots(config))
        return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", slots, "--max-cpu-loras", slots]
    return ["--weight-transfer-config", '{"backend": "nccl"}'] if on_gpu else []


def _environment(config: RunConfig, on_gpu: bool, environ: Mapping[str, str]) -> dict[str, str]:
    added = {}
    if config.adapter is not None:
        added["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    elif on_gpu:
        added["VLLM_SERVER_DEV_MODE"] = "1"  # enables the endpoints that receive weights
    if not on_gpu and CPU_CACHE not in environ:
        added[CPU_CACHE] = CPU_CACHE_GIB
    if config.vllm.device == "cpu":
        added[VISIBLE] = ""
    return added | (config.vllm.env or {})


def _warn_without_effect(config: RunConfig) -> None:
    module, device = config.vllm.serve_module, config.vllm.device
    if module is not None:
        warnings.warn(
            f"vllm.serve_module: {module} has no effect, because vLLM's OpenAI server is always used.", stacklevel=3
        )
    if device not in ("auto", "cpu", "cuda"):
        reason = "vLLM selects its device itself; supported values are auto, cpu and cuda"
        warnings.warn(f"vllm.device: {device} has no effect. {reason}.", stacklevel=3)


def max_lora_rank(config: RunConfig) -> int | None:
    """Return the smallest supported `--max-lora-rank` for the adapter of `config`, or None without an adapter.

    Raises ConfigError if vLLM cannot serve the adapter.
    """
    if config.adapter is None:
        return None
    if config.lora_model_dir is None:
        key, rank, trained_in_full = "lora_r", config.lora_r, config.lora_modules_to_save
    else:
        key = "lora_model_dir"
        rank, trained_in_full = _saved_adapter(config.lora_model_dir)
    if trained_in_full:
        raise ConfigError(
            f"lora_modules_to_save: vLLM does not support adapters with fully trained modules "
            f"({', '.join(trained_in_full)}). Remove them, or set trl.use_vllm: false."
        )
    if rank > RANKS[-1]:
        raise ConfigError(
            f"{key}: the adapter's rank {rank} exceeds the maximum of {RANKS[-1]} supported by vLLM. Reduce lora_r, or "
            "set trl.use_vllm: false."
        )
    return next(limit for limit in RANKS if limit >= rank)


def adapter_slots(config: RunConfig) -> int:
    """Return the maximum number of adapter versions in use at the same time.

    Each prefetched batch may use a different version, in addition to that of the current batch and the one being
    loaded.
    """
    return config.trl.prefetch_depth + 2


def _saved_adapter(folder: str) -> tuple[int, list[str] | None]:
    """Return the largest rank of a saved adapter and its fully trained modules."""
    path = Path(folder).expanduser() / "adapter_config.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        ranks = [saved["r"], *(saved.get("rank_pattern") or {}).values()]
        return max(ranks), saved.get("modules_to_save")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"lora_model_dir: cannot read a LoRA rank from {path} ({error!r}). Set it to the folder of a saved adapter."
        ) from None
