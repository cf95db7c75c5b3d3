"""Run configs of structured mode, and servers that are stand-ins."""

import sys
from pathlib import Path

import pytest

from ebft.run.config.schema import RunConfig
from ebft.serving.command import ServerCommand
from ebft.serving.server import VLLMServer
from tests.serving.processes import free_port

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture
def make_config():
    """`make_config(adapter="lora", vllm={...})`: a structured run config."""

    def make(**keys):
        data = [{"path": "unused", "type": "completion"}]
        if keys.get("adapter") and "lora_model_dir" not in keys:
            keys = {"lora_r": 16, "lora_alpha": 32, "lora_target_linear": True, **keys}
        keys["trl"] = {"use_vllm": True, **keys.get("trl", {})}
        return RunConfig.from_dict({"base_model": "nowhere/model", "rl": "ebft", "datasets": data, **keys})

    return make


@pytest.fixture
def pids(tmp_path):
    return tmp_path / "pids"


@pytest.fixture
def make_server(tmp_path, pids):
    """`make_server("--exit", "3")`: a server over the stand-in, stopped after the test."""
    made = []

    def make(*arguments, port=None):
        port = port or free_port()
        command = (sys.executable, str(STAND_IN), str(pids), "--port", str(port), *arguments)
        made.append(VLLMServer(ServerCommand(command, {}, "model", "127.0.0.1", port), tmp_path / "logs" / "vllm.log"))
        return made[-1]

    yield make
    for server in made:
        server.stop()
