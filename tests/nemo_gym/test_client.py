"""Which servers there are, and requests that fail."""

import json
import threading
import time

import pytest

from ebft.errors import ConfigError, RolloutError
from ebft.nemo_gym.client import ATTEMPTS, Failure, GymClient, Servers
from tests.nemo_gym.servers import slow
from tests.serving.processes import free_port


def listed(gym, client):
    return client.servers(5.0)


def test_servers_by_the_names_of_the_config(gym, client):
    tools = gym.resources("tools", lambda body: 1.0)
    agent = gym.agent("tools_simple_agent", lambda body: {})
    servers = listed(gym, client)
    assert servers.resources("tools").url == f"http://127.0.0.1:{tools.port}"
    assert servers.agent("tools_simple_agent").url == f"http://127.0.0.1:{agent.port}"
    # Either name leads to the server that is needed.
    assert servers.resources("tools_simple_agent").name == "tools"
    assert servers.agent("tools").name == "tools_simple_agent"


def test_names_that_lead_nowhere(gym, client):
    gym.resources("tools", lambda body: 1.0)
    gym.resources("math", lambda body: 1.0)
    for name in ("first", "second"):
        gym.agent(name, lambda body: {})
    servers = listed(gym, client)
    with pytest.raises(ConfigError, match="no server 'tool'. Servers: tools, math, first, second. Correct agent_ref"):
        servers.resources("tool")
    with pytest.raises(ConfigError, match="several agents for tools: first, second"):
        servers.agent("tools")
    with pytest.raises(ConfigError, match="no agent for the resources server math.*nemo_gym_multi_turn: false"):
        servers.agent("math")


@pytest.mark.parametrize("text", ["[1, 2]", "a: {", "just text"])
def test_something_else_at_the_port_of_the_head_server(text):
    with pytest.raises(ConfigError, match="http://head/global_config_dict_yaml is not"):
        Servers.parse("http://head", text)


@pytest.mark.parametrize("address", ["port: abc", "port: -1", "{host: [1], port: 80}", "port: [80]"])
def test_an_address_that_is_none(address):
    text = f"math: {{resources_servers: {{math: {address if '{' in address else '{' + address + '}'}}}}}"
    with pytest.raises(ConfigError, match="has no address for the server math"):
        Servers.parse("http://head", text)


def test_addresses_of_servers():
    text = "1: {resources_servers: {math: {host: '::', port: '80'}}}"
    assert Servers.parse("http://head", text).by_name["1"].url == "http://[::1]:80"


def test_no_head_server():
    client = GymClient(free_port(), timeout=1.0)
    assert not client.is_up()
    with pytest.raises(
        RolloutError, match="head server does not respond at .* after 0.5 s .*Start NeMo Gym with ng_run"
    ):
        client.servers(0.5)
    client.close()
    client.close()
    with pytest.raises(RolloutError, match="is closed"):
        client.is_up()


def test_requests_run_at_the_same_time(gym, client):
    server = gym.serve(lambda path, body: slow(1.0, body["number"]))
    began = time.monotonic()
    url = f"http://127.0.0.1:{server.port}/"
    assert client.post_all([(url, {"number": number}) for number in range(16)]) == list(range(16))
    assert time.monotonic() - began < 8  # one after another: 16


@pytest.mark.parametrize("first", [(503, {"detail": "busy"}), None], ids=["status 503", "lost connection"])
def test_a_failure_that_passes_is_retried(gym, client, first):
    answers = [first, first, {"ok": 1}]
    server = gym.serve(lambda path, body: answers.pop(0))
    assert client.post_all([(f"http://127.0.0.1:{server.port}/", {})]) == [{"ok": 1}]
    assert len(server.requests) == 3


def test_a_failure_that_stays(gym, client):
    server = gym.serve(lambda path, body: (500, {"detail": "broken"}))
    [failure] = client.post_all([(f"http://127.0.0.1:{server.port}/", {})])
    assert failure == Failure(f'status 500: {{"detail": "broken"}} ({ATTEMPTS} attempts)')
    assert len(server.requests) == ATTEMPTS


def test_a_rejected_request_is_not_retried(gym, client):
    server = gym.serve(lambda path, body: (422, {"detail": "strict is missing"}))
    [failure] = client.post_all([(f"http://127.0.0.1:{server.port}/", {})])
    assert "status 422" in failure.reason and "strict is missing" in failure.reason
    assert len(server.requests) == 1


def test_a_timeout_is_a_failure_after_the_given_time(gym):
    server = gym.serve(lambda path, body: slow(2.0, {}))
    client = GymClient(gym.head.port, timeout=0.3)
    began = time.monotonic()
    [failure] = client.post_all([(f"http://127.0.0.1:{server.port}/", {})])
    assert failure == Failure("no response within 0.3 s (nemo_gym_verify_timeout)")
    assert time.monotonic() - began < 1.5 and len(server.requests) == 1
    client.close()


def test_a_response_that_is_not_json(gym, client):
    gym.head_answer = lambda path: "text"
    # The body of the head server's answer is a JSON string, so send a request to a path that answers with no body.
    server = gym.serve(lambda path, body: (200, None))
    server.server.RequestHandlerClass.respond = lambda handler, body: (
        handler.send_response(200),
        handler.send_header("Content-Length", "5"),
        handler.end_headers(),
        handler.wfile.write(b"<html"),
    )
    [failure] = client.post_all([(f"http://127.0.0.1:{server.port}/", {})])
    assert failure == Failure("the response is not JSON: <html")


def test_cancelling_ends_the_wait(gym, client):
    from concurrent.futures import CancelledError

    server = gym.serve(lambda path, body: slow(3.0, {}))
    threading.Timer(0.2, client.cancel).start()
    with pytest.raises(CancelledError):
        client.post_all([(f"http://127.0.0.1:{server.port}/", {})])


def test_nested_values_arrive_unchanged(gym, client):
    server = gym.serve(lambda path, body: {})
    body = {"a": [{"b": None}, {"c": [1, 2.5, "é"]}], "d": {}}
    client.post_all([(f"http://127.0.0.1:{server.port}/", body)])
    assert json.dumps(server.requests[0]) == json.dumps(body)
