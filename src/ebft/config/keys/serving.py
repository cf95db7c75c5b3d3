"""The section `vllm:` of the config, and the settings of a server."""

import socket
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, field_validator

from ebft.config.keys.models import ModelSettings
from ebft.config.section import NotBlank, Section, paths, warn_of_variables
from ebft.errors import doing

Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Probability = Annotated[float, Field(gt=0, le=1)]


class VLLMSection(Section):
    """The section `vllm:`, with the options of the server that generates completions."""

    python: NotBlank | None = None
    """Path of a Python interpreter with vLLM; if unset, the interpreter that runs ebft."""
    env: dict[str, str] | None = Field(None, description="Additional environment variables for the server.")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 listens on all interfaces.")
    port: Port = Field(8000, description="Port to listen on; defaults to trl.vllm_server_port if that is set.")
    device: str = Field("auto", description="Device of the server: auto, cpu or cuda.")
    tensor_parallel_size: Count | None = Field(None, description="Number of GPUs per copy of the model.")
    data_parallel_size: Count | None = Field(None, description="Number of copies of the model.")
    gpu_memory_utilization: Probability = Field(0.9, description="Fraction of GPU memory that the server may use.")
    dtype: str = "auto"
    """Data type of the weights: auto (float32 on CPU), float16, bfloat16, float32."""
    max_model_len: Count | None = Field(None, description="Maximum sequence length in tokens.")
    enable_prefix_caching: bool | None = Field(None, description="Enable prefix caching.")
    enable_reasoning: bool | None = Field(None, description="Separate reasoning from the answers.")
    reasoning_parser: str | None = Field(None, description="Name of vLLM's reasoning parser.")
    tool_call_parser: str | None = None
    """Name of vLLM's parser of tool calls, for agents that call tools; enables automatic tool choice."""
    enforce_eager: bool | None = Field(None, description="Disable CUDA graphs.")
    serve_module: str | None = Field(None, description="Has no effect: vLLM's OpenAI server is always used.")
    worker_extension_cls: str | None = Field(None, description="Class that extends vLLM's workers.")

    _python_path = paths("python")

    @field_validator("env")
    @classmethod
    def _are_values(cls, env: dict[str, str] | None) -> dict[str, str] | None:
        for name, value in (env or {}).items():
            warn_of_variables(f"vllm.env.{name}", value)
        return env


@dataclass(frozen=True)
class ServerSettings:
    """The settings that a server is started with."""

    model: ModelSettings
    vllm: VLLMSection
    port: int
    seed: int
    prefetch_depth: int
    serves_agents: bool = False  # whether programs other than the trainer sample from the policy


# Hosts on which a server accepts connections on all network interfaces, and where this machine reaches it.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def base_url(host: str, port: int) -> str:
    """Return the URL for clients on this machine."""
    name = EVERYWHERE.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def check_free(host: str, port: int) -> None:
    """Raise OSError if a server cannot listen on `host` and `port`, usually because the port is in use."""
    with doing(f"trying to listen on vllm.host {host}, vllm.port {port}"):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: ignore remaining connections of a stopped server. A listening socket is still detected.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
