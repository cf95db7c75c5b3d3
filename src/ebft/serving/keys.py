"""The section `vllm:` of the config."""

from typing import Annotated

from pydantic import Field

from ebft.config.section import Section

Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Probability = Annotated[float, Field(gt=0, le=1)]


class VLLMSection(Section):
    """The section `vllm:`: the server that generates completions."""

    python: str | None = Field(None, description="Python interpreter that has vLLM (unset: the one that runs ebft).")
    env: dict[str, str] | None = Field(None, description="Further environment variables for the server.")
    host: str = Field("127.0.0.1", description="Address the server listens on; 0.0.0.0 is every one of the machine.")
    port: Port = Field(8000, description="Port the server listens on; where only trl.vllm_server_port is set, that.")
    device: str = Field("auto", description="Device of the server: auto, cpu or cuda.")
    tensor_parallel_size: Count | None = Field(None, description="GPUs that share one copy of the model.")
    data_parallel_size: Count | None = Field(None, description="Copies of the model.")
    gpu_memory_utilization: Probability = Field(0.9, description="Share of GPU memory the server may use.")
    dtype: str = Field("auto", description="Type of the weights: auto (float32 on a CPU), float16, bfloat16, float32.")
    max_model_len: Count | None = Field(None, description="Longest sequence the server takes.")
    enable_prefix_caching: bool | None = Field(None, description="Reuse the computation of shared prefixes.")
    enable_reasoning: bool | None = Field(None, description="Parse thinking out of answers.")
    reasoning_parser: str | None = Field(None, description="Parser of that thinking.")
    enforce_eager: bool | None = Field(None, description="Run without CUDA graphs.")
    serve_module: str | None = Field(None, description="Python module that serves.")
    worker_extension_cls: str | None = Field(None, description="Class that extends vLLM's workers.")
