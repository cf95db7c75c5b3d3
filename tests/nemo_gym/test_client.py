"""Which servers there are, requests that fail, and starting servers; `ng_run` is a small program of the same name."""

import json
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError

import pytest

from ebft.errors import ConfigError, ServerError
from ebft.nemo_gym.client import ATTEMPTS, Failure, GymClient, started_servers
from tests.nemo_gym.servers import config_of, slow
from tests.serving.processes import alive, eventually, free_port


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
    with pytest.raises(ConfigError, match="no server 'tool' .*Servers: tools, math, tools_simple_agent, second"):
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


NG_RUN = """
import http.server, json, os, pathlib, sys
port = int(next(word for word in sys.argv if word.startswith("+head_server.port=")).partition("=")[2])
pathlib.Path("started.json").write_text(json.dumps({"arguments": sys.argv[1:], "pid": os.getpid()}))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'"{}"')
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def make(tmp_path):
    """`make(program, **keys)`: keys for a folder in which `program` is ng_run, or none."""

    def keys(program=None, **changes):
        path = tmp_path / "gym" / ".venv" / "bin" / "ng_run"
        path.parent.mkdir(parents=True, exist_ok=True)
        if program is not None:
            path.write_text(f"#!{sys.executable}\n{textwrap.dedent(program)}")
            path.chmod(0o755)
        given = {"nemo_gym_auto_start": True, "nemo_gym_dir": str(tmp_path / "gym"), "nemo_gym_server_timeout": 20}
        given |= {"nemo_gym_config_paths": ["a.yaml", "configs/b.yaml"], "nemo_gym_head_port": free_port(), **changes}
        return config_of({"path": "rows.jsonl"}, **given)

    return keys


def started(tmp_path):
    return json.loads((tmp_path / "gym" / "started.json").read_text())


def test_servers_run_as_long_as_training(make, tmp_path):
    keys = make(NG_RUN)
    with started_servers(keys, str(tmp_path)):
        found = started(tmp_path)
        assert found["arguments"][:2] == ["+config_paths=[a.yaml,configs/b.yaml]", "+skip_venv_if_present=true"]
        assert alive({found["pid"]})
    assert eventually(lambda: not alive({found["pid"]}))


def test_servers_that_run_already_are_used_and_none_are_started_unless_asked_for(make, tmp_path, gym, capsys):
    with started_servers(make(nemo_gym_head_port=gym.head.port), str(tmp_path)):
        assert "Using the NeMo Gym servers that run at" in capsys.readouterr().err
    with started_servers(make(NG_RUN, nemo_gym_auto_start=False), str(tmp_path)):
        assert not (tmp_path / "gym" / "started.json").exists()


def test_servers_that_do_not_start(make, tmp_path):
    began, starting = time.monotonic(), started_servers(make("raise SystemExit('no config')"), str(tmp_path))
    with pytest.raises(ServerError, match="(?s)ng_run exited before it was up.*no config"), starting:
        raise AssertionError("the block must not run")
    assert time.monotonic() - began < 15
