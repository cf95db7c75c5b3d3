"""A server that is not there: one clear error, early, within the timeout."""

import time

import pytest

from ebft import train
from ebft.config.schema import RunConfig
from ebft.errors import RolloutError
from tests.serving.processes import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_that_is_never_up(tmp_path, host):
    port = free_port()
    config = RunConfig.from_dict(
        {
            "base_model": "no/such-model",  # never looked for
            "rl": "ebft",
            "micro_batch_size": 8,
            "trl": {"use_vllm": True, "vllm_server_host": host, "vllm_server_port": port, "vllm_server_timeout": 1.5},
            "datasets": [{"path": "nothing", "type": "ebft_opencode.transform"}],
            "adapter": "lora",
            "lora_r": 4,
            "lora_alpha": 8,
            "lora_target_linear": True,
            "output_dir": tmp_path / "out",
        }
    )
    began = time.monotonic()
    with pytest.raises(RolloutError, match=f"127.0.0.1:{port} is not ready after 1.5 s .*`ebft vllm-serve CONFIG`"):
        train(config)
    assert time.monotonic() - began < 10
