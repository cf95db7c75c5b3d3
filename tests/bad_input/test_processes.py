"""Bad input in processes of their own, where a crash or a hang would show."""

import os
import subprocess
import sys

import pytest

from tests.bad_input import data_files, user_code
from tests.bad_input.cases import Outcome, complaint, prepare

pytestmark = pytest.mark.slow

NAMES = ((data_files, "null in json"), (user_code, "transform: exits with 0"))
CASES = [case for module, name in NAMES for case in module.CASES if case.name == name]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_process(case, tmp_path, tiny_llama_dir):
    prepare(case, tmp_path, tiny_llama_dir)
    ended = run(case, tmp_path)
    assert complaint(case, Outcome(ended.returncode, ended.stderr), tmp_path) is None


def run(case, folder):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "ebft", *case.command.split()]
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    return subprocess.run(command, cwd=folder, env={**environment, "PYTHONPATH": paths}, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
