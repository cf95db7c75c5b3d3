"""Which servers there are, and requests that fail."""

import json
import threading
import time
from concurrent.futures import CancelledError

import pytest

from ebft.errors import ConfigError
from ebft.nemo_gym.client import ATTEMPTS, Failure, GymClient
from tests.nemo_gym.servers import slow


def test_servers_by_the_names_of_the_config(gym, client):
    tools = gym.resources("tools", lambda body: 1.0)
    agent = gym.agent("tools_simple_agent", lambda body: {})
    servers = client.servers(5.0)
    assert servers.resources("tools").url == f"http://127.0.0.1:{tools.port}"
    assert servers.agent("tools_simple_agent").url == f"http://127.0.0.1:{agent.port}"
    # Either name leads to the server that is needed.
    assert servers.resources("tools_simple_agent").name == "tools"
    assert servers.agent("tools").name == "tools_simple_agent"
    gym.resources("math", lambda body: 1.0)
    gym.agent("second", lambda body: {})
    servers = client.servers(5.0)
    with pytest.raises(ConfigError, match="no server 'tool'. Servers: tools, math, tools_simple_agent, second. Corr"):
        servers.resources("tool")
    for name, found in (("tools", "tools_simple_agent, second"), ("math", "none")):
        with pytest.raises(ConfigError, match=f"one agent for the resources server {name}, but NeMo Gym has {found}"):
            servers.agent(name)


BROKEN = Failure(f'status 500: {{"detail": "broken"}} ({ATTEMPTS} attempts)')
REJECTED = Failure('status 422: {"detail": "strict is missing"}')


@pytest.mark.parametrize(("answers", "expected"), [
    ([(503, {"detail": "busy"}), None, {"ok": 1}], {"ok": 1}),  # None is a lost connection
    ([(500, {"detail": "broken"})] * ATTEMPTS, BROKEN),
    ([(422, {"detail": "strict is missing"})], REJECTED),
])  # fmt: skip
def test_failures_that_may_pass_are_retried(gym, client, answers, expected):
    left, body = list(answers), {"a": [{"b": None}, {"c": [1, 2.5, "é"]}], "d": {}}
    server = gym.serve(lambda path, body: left.pop(0))
    assert client.post_all([(f"http://127.0.0.1:{server.port}/", body)]) == [expected]
    assert list(map(json.dumps, server.requests)) == [json.dumps(body)] * len(answers)


def test_a_timeout_is_a_failure_after_the_given_time(gym):
    server = gym.serve(lambda path, body: slow(2.0, {}))
    for are_runs, given, key in ((False, (0.3, 60.0), "verify"), (True, (60.0, 0.3), "run")):
        client = GymClient(gym.head.port, *given)
        began = time.monotonic()
        [failure] = client.post_all([(f"http://127.0.0.1:{server.port}/", {})], are_runs)
        assert failure == Failure(f"no response within 0.3 s (nemo_gym_{key}_timeout)")
        assert time.monotonic() - began < 1.5 and len(server.requests) == 1 + are_runs
        client.close()


def test_cancelling_ends_the_wait(gym, client):
    server = gym.serve(lambda path, body: slow(3.0, {}))
    threading.Timer(0.2, client.cancel).start()
    with pytest.raises(CancelledError):
        client.post_all([(f"http://127.0.0.1:{server.port}/", {})])
