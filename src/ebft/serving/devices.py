"""Which GPUs the server gets, and which are left to the trainer."""

import os
from collections.abc import Mapping

from ebft.config.schema import RunConfig
from ebft.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def serves_on_gpu(config: RunConfig, gpus: int) -> bool:
    """Whether the server runs on a GPU, of which `gpus` are visible here."""
    if config.vllm.device == "cuda" and gpus == 0:
        raise ConfigError("vllm.device: cuda, but there is no GPU here. Remove it, or set vllm.device: cpu.")
    return gpus > 0 and config.vllm.device != "cpu"


def device_environment(
    config: RunConfig, processes: int, gpus: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment that gives a server beside `processes` trainers on this machine the last of `gpus` GPUs.

    Trainers take the first ones. Empty where nothing is to be divided: without GPU, and where vllm.env chooses.
    """
    if not serves_on_gpu(config, gpus) or VISIBLE in (config.vllm.env or {}):
        return {}
    wanted = (config.vllm.tensor_parallel_size or 1) * (config.vllm.data_parallel_size or 1)
    if wanted + processes > gpus:
        raise ConfigError(
            f"The vLLM server needs {wanted} GPU{'s' * (wanted > 1)} (tensor_parallel_size times data_parallel_size) "
            f"and the trainer {processes}, but {gpus} {'is' if gpus == 1 else 'are'} visible. Set trl.vllm_mode: "
            "colocate to share them, set trl.use_vllm: false to generate without vLLM, launch fewer processes, or "
            "make more GPUs visible."
        )
    return {VISIBLE: ",".join(_names(gpus, environ)[-wanted:])}


def _names(gpus: int, environ: Mapping[str, str]) -> list[str]:
    """The visible devices as CUDA_VISIBLE_DEVICES names them: indices, or UUIDs where the user gave those."""
    if VISIBLE not in environ:
        return [str(index) for index in range(gpus)]
    return [name.strip() for name in environ[VISIBLE].split(",")][:gpus]
