"""A server that is not there, or is not vLLM: one clear error, early, within the timeout."""

import socket
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ebft import train
from ebft.errors import RolloutError
from ebft.nemo_gym.client import Failure, GymClient
from ebft.run.config.schema import RunConfig
from ebft.structured.rollouts.client import VLLMClient
from ebft.structured.rollouts.turns import Sampling
from tests.nemo_gym import servers
from tests.serving.processes import free_port

JSON = "application/json"
SAMPLING = Sampling(1.0)
CHOICE = '{"choices": [{"token_ids": %s, "logprobs": %s}]}'


@pytest.fixture
def gym():
    with servers.gym() as made:
        yield made


@contextmanager
def answering(body, kind=JSON, host="127.0.0.1", **headers):
    """A client of a server that gives every request the same response."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            for name, value in {"Content-Type": kind, "Content-Length": len(body), **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with Server((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        client = VLLMClient(host, server.server_address[1], 5.0)
        yield client
        client.close()
        server.shutdown()
        thread.join()


def test_a_response_that_does_not_end(gym):
    def trickle(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        with suppress(OSError):
            for _ in range(100):
                handler.wfile.write(b"a")
                time.sleep(0.05)

    server = gym.serve(None)
    server.server.RequestHandlerClass.respond = trickle
    vllm, head = VLLMClient("127.0.0.1", server.port, 0.5), GymClient(server.port, timeout=0.5)
    with pytest.raises(RolloutError, match="did not respond to /tokenize within 0.5 s"):
        vllm.tokenize("m", "text")
    assert head.post_all([(head.head, {})]) == [Failure("no response within 0.5 s (nemo_gym_verify_timeout)")]
    vllm.close()
    head.close()


def test_a_server_that_is_not_vllm():
    with answering("<html>Welcome</html>", kind="text/html") as client, pytest.raises(TypeError) as caught:
        client.models()
    assert "responds to /v1/models" in caught.value.__notes__[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_that_is_never_up(tmp_path, host):
    port = free_port()
    server = {"vllm_server_host": host, "vllm_server_port": port, "vllm_server_timeout": 1.5}
    adapter = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
    given = {"base_model": "no/such-model", "rl": "ebft", "micro_batch_size": 8}  # the model is never looked for
    given |= {"trl": {"use_vllm": True, **server}, "datasets": [{"path": "nothing", "type": "ebft_opencode.transform"}]}
    config = RunConfig.from_dict({**given, **adapter, "output_dir": tmp_path / "out"})
    began = time.monotonic()
    with pytest.raises(RolloutError, match=f"127.0.0.1:{port} is not ready after 1.5 s .*`ebft vllm-serve CONFIG`"):
        train(config)
    assert time.monotonic() - began < 10
