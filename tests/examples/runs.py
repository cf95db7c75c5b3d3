"""Runs the quickstart as a user does, at the size of a test."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 900  # seconds, of which an idle machine needs 30


def run_quickstart(*arguments: str, status: int = 0, **variables: str) -> str:
    """What `ebft quickstart` prints; `variables` of its environment, and the exit status that it must have."""
    command = [sys.executable, "-m", "ebft", "quickstart", "--scale", "test", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "140", **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr * (status != 0)
