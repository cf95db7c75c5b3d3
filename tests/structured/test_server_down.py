"""A server that is not there, or is not vLLM: one clear error, early, within the timeout."""

import time
from contextlib import suppress

import pytest

from ebft import train
from ebft.errors import RolloutError
from ebft.run.config.schema import RunConfig
from ebft.structured.rollouts.client import VLLMClient
from tests.nemo_gym import servers
from tests.serving.processes import free_port


def test_a_response_that_does_not_end_and_a_server_that_is_not_vllm():
    def trickle(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        with suppress(OSError):
            for _ in range(100):
                handler.wfile.write(b"a")
                time.sleep(0.05)

    with servers.gym() as gym:
        server, other = gym.serve(None), gym.serve(lambda path, body: "Welcome")
        server.server.RequestHandlerClass.respond = trickle
        vllm = VLLMClient("127.0.0.1", server.port, 0.5)
        with pytest.raises(RolloutError, match="did not respond to /tokenize within 0.5 s"):
            vllm.tokenize("m", "text")
        not_vllm = VLLMClient("127.0.0.1", other.port, 5.0)
        with pytest.raises(TypeError) as caught:
            not_vllm.models()
        assert "responds to /v1/models" in caught.value.__notes__[0]
        for client in (vllm, not_vllm):
            client.close()


def test_errors_are_retried_with_a_bound(monkeypatch):
    monkeypatch.setattr("ebft.structured.rollouts.client._BACKOFF", 0.01)
    with servers.gym() as gym:
        answers = [(500, {})] * 4 + [{"data": [1]}] + [(500, {"error": "x"})] * 5 + [(400, {"error": "no"})]
        server = gym.serve(lambda path, body: answers.pop(0))
        client = VLLMClient("127.0.0.1", server.port, 5.0)
        assert client.models() == [1]
        with pytest.raises(RolloutError, match="failed 5 times on /v1/models.*500"):
            client.models()
        with pytest.raises(RolloutError, match="rejected /v1/models.*400: .*no"):
            client.models()
        client.close()


def test_a_server_that_is_never_up(tmp_path):
    port = free_port()
    server = {"vllm_server_host": "0.0.0.0", "vllm_server_port": port, "vllm_server_timeout": 1.5}
    adapter = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
    given = {"base_model": "no/such-model", "rl": "ebft", "micro_batch_size": 8}  # the model is never looked for
    given |= {"trl": {"use_vllm": True, **server}, "datasets": [{"path": "nothing", "type": "ebft_opencode.transform"}]}
    config = RunConfig.from_dict({**given, **adapter, "output_dir": tmp_path / "out"})
    began = time.monotonic()
    with pytest.raises(RolloutError, match=f"127.0.0.1:{port} is not ready after 1.5 s .*`ebft vllm-serve CONFIG`"):
        train(config)
    assert time.monotonic() - began < 10
