"""`ebft vllm-serve`: what it says and how it ends; the server is a stand-in with processes and nothing else."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.processes import alive, free_port, pids_in

SERVING = Path(__file__).parents[1] / "serving"
RUN = """{base_model: nowhere/model, rl: ebft, trl: {use_vllm: true}, datasets: [{path: unused, type: completion}],
adapter: lora, lora_r: 12, lora_alpha: 16, lora_target_linear: true, output_dir: out}
"""
SERVER = """
import sys
sys.path.insert(0, PATH)
import stand_in
sys.argv[1:1] = [PIDS]
stand_in.main()
"""


@pytest.mark.slow
def test_a_signal_ends_everything(tmp_path):
    """A stand-in is where vLLM's server would be."""
    pids, package = tmp_path / "pids", tmp_path / "packages" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    program = SERVER.replace("PATH", repr(str(SERVING))).replace("PIDS", repr(str(pids)))
    (package / "api_server.py").write_text(program)
    (tmp_path / "run.yaml").write_text(RUN)
    path = os.pathsep.join((str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "ebft", "vllm-serve", "run.yaml", f"vllm.port={free_port()}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
    try:
        said = r"vLLM is serving nowhere/model at http://127\.0\.0\.1:\d+ \(LoRA up to rank 16\)\. Press Ctrl-C .*\n"
        assert re.fullmatch(said, process.stdout.readline())
        started = pids_in(pids)
        assert len(alive(started)) == 2
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert rest == "" and "The vLLM server was stopped." in errors and "Traceback" not in errors
    assert alive(started) == []
    assert "stand-in: started" in (tmp_path / "out" / "vllm.log").read_text()
