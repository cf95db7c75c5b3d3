"""Bad input in processes of their own, where a crash or a hang would show."""

import os
import subprocess
import sys

import pytest

from tests.bad_input import configs, data_files, user_code
from tests.bad_input.cases import Outcome, complaint, prepare

pytestmark = pytest.mark.slow

NAMES = (
    (configs, "FIFO"),
    (configs, "billion laughs in merge keys"),
    (data_files, "null in json"),
    (user_code, "transform: exits with 0"),
)
CASES = [case for module, name in NAMES for case in module.CASES if case.name == name]
SECONDS = 300  # such a process ends after a few seconds on an idle machine


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_process(case, tmp_path, tiny_llama_dir):
    prepare(case, tmp_path, tiny_llama_dir)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "ebft.cli", *case.command.split()]
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    ended = subprocess.run(
        command, cwd=tmp_path, env={**environment, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=SECONDS
    )
    assert complaint(case, Outcome(ended.returncode, ended.stderr), tmp_path) is None
