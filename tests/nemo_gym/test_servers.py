"""Starting NeMo Gym's servers with training; `ng_run` is a small program of the same name."""

import json
import sys
import textwrap
import time

import pytest

from ebft.errors import ServerError
from ebft.nemo_gym.client import started_servers
from tests.nemo_gym.servers import config_of
from tests.serving.processes import alive, eventually, free_port

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
