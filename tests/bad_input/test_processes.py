"""Bad input in processes of their own, where a crash or a hang would show."""

import os
import subprocess
import sys

import pytest

from tests.bad_input import configs, data_files, user_code
from tests.bad_input.cases import Outcome, complaint, entry, good, prepare
from tests.bad_input.user_code import OK_TRANSFORM, transform

pytestmark = pytest.mark.slow

NAMES = ((configs, "FIFO"), (configs, "billion laughs in merge keys"), (data_files, "null in json"),
         (user_code, "transform: exits with 0"))  # fmt: skip
CASES = [case for module, name in NAMES for case in module.CASES if case.name == name]
SECONDS = 300  # such a process ends after a few seconds on an idle machine


DYING = [
    transform("crashes in C", "import faulthandler; faulthandler._sigsegv()"),
    transform("ends the process", "import os; os._exit(0)"),
    transform("kills the process", "import os; os.kill(os.getpid(), 9)"),
    good("transform: starts a process",
         files={"own.py": OK_TRANSFORM.format(body="import os\n        if os.fork() == 0: os._exit(0)")},
         config=entry(type="own.transform")),
]  # fmt: skip


def test_the_end_of_the_process_is_named(tmp_path, tiny_llama_dir):
    expected = [(-11, 'own.py", line 4 in step'), (1, "row 0 called os._exit(0)."), (-9, "row 0 sends signal 9"),
                (0, "Model saved")]  # fmt: skip
    for number, (case, (code, text)) in enumerate(zip(DYING, expected)):
        folder = tmp_path / str(number)
        folder.mkdir()
        prepare(case, folder, tiny_llama_dir)
        ended = run(case, folder)
        assert (ended.returncode, text in ended.stderr + ended.stdout) == (code, True), ended.stderr[-900:]


THREADS = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from ebft.tools.cli.console import name_remaining_threads
pool = ThreadPoolExecutor()
pool.submit(print).result()  # its idle threads end with the interpreter
if sys.argv[1:]:
    threading.Thread(target=time.sleep, args=(60,), name="my upload").start()
name_remaining_threads(3, (0.3, 0.3))
"""


def test_a_thread_that_never_ends_is_named_and_left():
    assert subprocess.run([sys.executable, "-c", THREADS], capture_output=True, timeout=60).returncode == 0
    ended = subprocess.run([sys.executable, "-c", THREADS, "x"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3
    said = "The command is complete, but threads that user code started are still running: my upload"
    assert said in ended.stderr and "The command ends now" in ended.stderr


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
                          timeout=SECONDS)  # fmt: skip
