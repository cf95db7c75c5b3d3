"""Assignment of GPUs to the server and the trainer."""

import os
from collections.abc import Mapping

from ebft.errors import ConfigError
from ebft.serving.keys import VLLMSection

VISIBLE = "CUDA_VISIBLE_DEVICES"


def serves_on_gpu(vllm: VLLMSection, gpus: int) -> bool:
    """Whether the server runs on a GPU, given the number of visible GPUs."""
    if vllm.device == "cuda" and gpus == 0:
        raise ConfigError("vllm.device: cuda requires a GPU, but none is available. Remove it, or set it to cpu.")
    return gpus > 0 and vllm.device != "cpu"


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
            f"The vLLM server requires {wanted} GPU{'s' * (wanted > 1)} (tensor_parallel_size times "
            f"data_parallel_size) and the trainer {processes}, but only {gpus} {'is' if gpus == 1 else 'are'} visible. "
            "Set trl.vllm_mode: colocate to share GPUs, set trl.use_vllm: false to generate without vLLM, launch fewer "
            "processes, or make more GPUs visible."
        )
    return {VISIBLE: ",".join(_names(gpus, environ)[-wanted:])}


def _names(gpus: int, environ: Mapping[str, str]) -> list[str]:
    """Return the visible devices as in CUDA_VISIBLE_DEVICES: indices, or UUIDs if the user set these."""
    if VISIBLE not in environ:
        return [str(index) for index in range(gpus)]
    return [name.strip() for name in environ[VISIBLE].split(",")][:gpus]
